"""Fingerprint of a model's weights: enough to tell one base model from another."""

import hashlib
import json
from collections.abc import Callable, Iterable

import numpy as np

from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.parallel.layout import Slices

ROWS = 16  # of each parameter at least, or all of them where it has fewer


def fingerprint(table: Iterable[ParameterSpec], read: Callable[[str, Slices], np.ndarray]) -> str:
    """Compute the SHA-256 of a model's names, shapes and a sample of its numbers.

    The sample is every n-th row of each parameter, at least 16 rows and fewer than 32 (all of them where there are no
    more), because reading the whole of a large file at each start would take longer than the rest of the start.
    Numbers are taken as float32 under Hugging Face's names, so that a model has one fingerprint in any file format,
    sharding, or dtype that holds it exactly. A change of a few rows alone can go unseen; training changes all of them.
    table: without adapters. read: gives the part of a parameter, by name, that the slices cut out, float32.
    """
    digest = hashlib.sha256()
    for spec in table:
        digest.update(json.dumps([spec.hf_name, list(spec.shape)]).encode() + b"\n")
        part = read(spec.name, (slice(None, None, max(1, spec.shape[0] // ROWS)),))
        digest.update(np.ascontiguousarray(part, "<f4").data)
    return digest.hexdigest()
