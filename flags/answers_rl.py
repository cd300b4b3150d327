"""What a name of TRL, verl, prime-rl or OpenRLHF is answered with in grpo.py and in forks/train_dpo.py,
where its meaning is another than in a recipe for pre-training. These rows come before all others.

other_names.py reads this table. Only mistakes load it.
"""

from flags.answers import Answer

OF_GRPO = [
    Answer(
        "per_device_train_batch_size micro_batch_size device_batch_size batch_size",
        "did you mean --local_batch_size? It is what one data rank runs at once; "
        "--prompts_per_step x --group_size samples are a whole step",
    ),
    Answer(
        "global_batch_size generation_batch_size steps_per_generation gradient_accumulation_steps "
        "grad_accum_steps orchestrator.batch_size",
        "--prompts_per_step x --group_size is the number of samples of a step; what exceeds "
        "--local_batch_size is accumulated",
    ),
    Answer(
        "num_iterations ppo_epochs",
        "every sample is trained on once; --minibatches makes several updates per step, on equal "
        "parts of its groups",
    ),
    Answer(
        "ppo_mini_batch_size mini_batch_size",
        "--minibatches is their number: updates per step, on equal parts of its groups",
    ),
    Answer(
        "epochs num_epochs num_train_epochs total_epochs",
        "--steps counts steps of --prompts_per_step prompts; an epoch has as many as the problems "
        "fill",
    ),
    Answer(
        "optimizer optim optim_name optimizer_type optimizer.name optimizer.type",
        "no such choice: GRPO updates with AdamW only; the recipes for pre-training and "
        "finetune.py have a choice",
    ),
    Answer(
        "decay_type lr_scheduler_type lr_decay_style lr_schedule warmup_style",
        "no such choice: the learning rate falls linearly to --min_lr_ratio of its peak",
    ),
    Answer(
        "max_prompt_length prompt_length",
        "--seq_len bounds prompt and sample together, --max_new_tokens the sample",
    ),
    Answer("clip_ratio cliprange", "there are two: --clip_low and --clip_high"),
    Answer(
        "clip_ratio_c delta token_mask_high",
        "no counterpart: ratios have --clip_low and --clip_high; a second bound is a line in "
        "policy_loss of a copied grpo.py",
    ),
    Answer(
        "loss_agg_mode",
        "--loss chooses the mean: dapo over all tokens, grpo over samples, dr_grpo by a constant; "
        "see LOSSES in grpo.py",
    ),
    Answer(
        "importance_sampling_level",
        "--loss gspo has a ratio per sequence, the others have one per token",
    ),
    Answer(
        "adv_estimator advantage_estimator",
        "advantages are relative to the group of a prompt; --loss chooses the loss, --std_norm "
        "divides by the deviation",
    ),
    Answer(
        "kl_loss_type kl_penalty kl_estimator", "no such choice: --kl_coef weighs the estimator k3"
    ),
    Answer(
        "use_kl_in_reward kl_reward",
        "no counterpart: the divergence is in the loss, --kl_coef, and not in the reward",
    ),
    Answer(
        "entropy_coeff entropy_coef entropy_bonus ent_coef",
        "no counterpart: an entropy bonus is a line in policy_loss of a copied grpo.py, where "
        "entropy has its gradient",
    ),
    Answer(
        "gamma lam gae_lambda vf_coef cliprange_value critic.optim.lr critic.model.path "
        "critic_warmup value_model",
        "no counterpart: there is no critic; advantages are relative to the group of a prompt",
    ),
    Answer(
        "ref_model_sync_steps sync_ref_model ref_model_mixup_alpha ref_model_path ref_model",
        "no counterpart: the reference of --kl_coef is the initial policy, and stays",
    ),
    Answer(
        "reward_weights multi_objective_aggregation",
        "no counterpart: a file of your own for --reward or --env returns the weighted sum",
    ),
    Answer(
        "reward_model reward_model_path reward_model.enable reward_model.path rm_path",
        "no counterpart: rewards are functions, --reward my_reward.py; that file may ask a model "
        "or a server",
    ),
    Answer(
        "use_vllm vllm_mode rollout.mode rollout.name inference.server",
        "--engine URL lets a server of vLLM or SGLang sample; without it the processes of the run "
        "sample",
    ),
    Answer(
        "vllm_server_port vllm_group_port",
        "--engine has address and port in one: --engine http://127.0.0.1:8000",
    ),
    Answer(
        "vllm_gpu_memory_utilization gpu_memory_utilization vllm_enable_sleep_mode "
        "free_cache_engine enforce_eager",
        "no counterpart: with --engine this is an option of the server; without, --rollout_rows "
        "bounds the cache",
    ),
    Answer(
        "vllm_tensor_parallel_size rollout.tensor_model_parallel_size",
        "no counterpart: --tp splits training and sampling alike; with --engine this is an option "
        "of the server",
    ),
    Answer(
        "top_p top_k min_p repetition_penalty sampling.top_p rollout.top_p",
        "no counterpart: samples are drawn from the whole distribution at --temperature, whose "
        "probabilities the loss takes",
    ),
    Answer(
        "val_before_train eval_on_start",
        "nothing to type: --eval_every evaluates before the first step, too",
    ),
    Answer("shuffle shuffle_dataset", "nothing to type: --seed chooses the order of the prompts"),
]
OF_DPO = [
    Answer(
        "global_batch_size gradient_accumulation_steps grad_accum_steps train_batch_size",
        "--pairs_per_step is the size of a step; what exceeds --local_batch_size is accumulated",
    ),
    Answer("optimizer optim optimizer_type", "no such choice: DPO updates with AdamW only"),
]
