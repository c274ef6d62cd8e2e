"""Faults of ranks that share a GPU in turns, so that a killed one takes nothing from the others."""

from __future__ import annotations

import re

from tests.faults.test_suite import inject


def test_a_few_faults_on_a_gpu(tmp_path):
    turns = ("--transport", "GPU", "--at-once", "6", "--each", "--seconds", "45")
    told = inject(tmp_path, "--faults", "16", "--seed", "1", *turns, timeout_s=200)
    assert len(re.findall(r"^seed \d+: GPU, .* good", told, re.MULTILINE)) >= 5, told
