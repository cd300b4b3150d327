"""Each recipe runs on the null device, with each flag and pair of flags that takes another way there: two steps, status 0."""
import pytest

RECIPES = ("train_llama3.py", "train_qwen3.py", "train_deepseek.py")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(device, tmp_path, recipe):
    done = device.run(tmp_path, recipe)
    assert "step 2/2" in done.texts[0]
    assert any(line.startswith("kernel") for line in done.logs[0])
