"""A taskset of the library verifiers (`pip install verifiers`, 0.4.0 was tried) as a task of
grpo.py.

    python grpo.py --env verifiers --sft_steps 60 --out runs/verifiers

Edit TASKSET. The example is a taskset in the library's own classes, as those of its hub are. A
prompt is answered by one text, and the task's rewards judge the text, each with its weight, and are
logged by their names. Tasksets whose rewards need a container, or a harness with tools, are not for
this file.
"""

import asyncio

try:
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
except ImportError:
    raise ValueError("tasks of verifiers need a library: pip install verifiers") from None


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def correct(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.1)
    async def short(self, task, trace) -> float:
        return float(len(trace.last_reply) <= 2)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(400):
            yield SumTask(SumData(prompt=f"{i % 20}+{i // 20}=", answer=str(i % 20 + i // 20)))


TASKSET = Sums(vf.TasksetConfig())
tasks = {task.data.prompt_text: task for task in TASKSET}
ALPHABET = "0123456789+="
problems = [(prompt, task.data.answer) for prompt, task in tasks.items()]


def reward(prompt: str, completion: str) -> dict[str, float]:
    """{name: reward x weight} of the task's rewards for a conversation of the prompt and this
    answer."""
    task = tasks[prompt]
    messages = [vf.UserMessage(content=prompt), vf.AssistantMessage(content=completion)]
    nodes = [
        MessageNode(message=messages[0], parent=None, sampled=False),
        MessageNode(message=messages[1], parent=0, sampled=True),
    ]
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        nodes=nodes,
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    asyncio.run(task.score(trace))
    return {name: found.value for name, found in trace.rewards.items() if found is not None}
