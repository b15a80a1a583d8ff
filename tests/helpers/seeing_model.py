"""A small model that sees, with what another implementation stored of every stage."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from small_model import SmallModel

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.checkpoint.hf_tensors import joined
from mindrlhf.configs.images import read_image_settings
from mindrlhf.images.processor import ImageProcessor, Picture
from mindrlhf.models.parameters import parameter_table
from mindrlhf.training.batch import SequenceGroup


@dataclass(frozen=True, eq=False)
class Seeing(SmallModel):
    """A small model; stored arrays and facts; its pictures; sequences: ids without padding and their pictures."""

    stored: dict[str, np.ndarray]
    facts: dict
    pictures: list[Picture]
    sequences: list[tuple[np.ndarray, list[Picture]]]

    @classmethod
    def load(cls, folder: Path) -> "Seeing":
        config, weights = read_hf_config(folder, seeing=True), load_file(folder / "model.safetensors")
        with np.load(folder / "golden.npz") as file:
            stored = dict(file)
        facts = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        processor = ImageProcessor(read_image_settings(folder))
        pictures = [processor.picture(stored[f"image_{i}"], "here") for i in range(len(facts["images"]))]
        masks = stored["attention_mask"] == 1
        rows = zip(stored["input_ids"], masks, facts["sequences"], strict=True)
        return cls(
            config=config,
            arrays={spec.name: joined(spec, weights) for spec in parameter_table(config)},
            stored=stored,
            facts=facts,
            pictures=pictures,
            sequences=[(ids[mask], [pictures[i] for i in row["images"]]) for ids, mask, row in rows],
        )

    @property
    def groups(self) -> list[SequenceGroup]:
        """The sequences as groups of one token and everything behind it, pictures included."""
        return [SequenceGroup(ids[:1], (ids[1:],), pictures=((), tuple(pictures))) for ids, pictures in self.sequences]

    @property
    def weights(self) -> list[tuple[np.ndarray]]:
        """The weights of the stored loss, the mean over targets that are no images' tokens."""
        sizes = [len(ids) - 1 for ids, _ in self.sequences]
        valid = [row[-size:] for row, size in zip(self.stored["valid"], sizes, strict=True)]
        total = sum(float(row.sum()) for row in valid)
        return [((row / total).astype(np.float32),) for row in valid]

    def check_log_probs(self, outputs) -> None:
        """Compare outputs of `groups` with the stored log-probs."""
        for row, (ids, _) in enumerate(self.sequences):
            size = len(ids) - 1
            own = outputs[row][0] * self.stored["valid"][row][-size:]
            np.testing.assert_allclose(own, self.stored["token_logprobs"][row][-size:], rtol=0, atol=2e-5)

    def check_norms(self, gradients) -> None:
        """Compare the norms of gradients, by our names, with the stored ones."""
        names = {spec.name: spec.hf_name for spec in self.specs}
        assert set(names.values()) == set(self.facts["grad_norms"])
        for name, gradient in gradients.items():
            own = np.linalg.norm(gradient.astype(np.float64))
            np.testing.assert_allclose(own, self.facts["grad_norms"][names[name]], rtol=1e-4, err_msg=name)
