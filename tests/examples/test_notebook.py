"""The notebook of examples/notebooks runs top to bottom, and its model learns."""

import json

import jobs
import pytest

NOTEBOOK = jobs.ROOT / "examples" / "notebooks" / "first_steps.ipynb"


@pytest.mark.slow
def test_first_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    namespace = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "first_steps.ipynb", "exec"), namespace)
    rewards = namespace["rewards"]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 5 * 0.08
    held_out = [entry["eval_reward"] for entry in namespace["trainer"].state.log_history if "eval_reward" in entry]
    assert len(held_out) == 3
    assert held_out[0] < 0.7  # 0.56 was seen, and 0.94 at the end
    assert held_out[-1] > held_out[0] + 0.2
    assert namespace["measured"]["eval_reward"] == pytest.approx(held_out[-1])
    assert namespace["trainer"].plot()._repr_png_().startswith(b"\x89PNG")
    assert (tmp_path / "out/first_steps/trained/model.safetensors").is_file()
