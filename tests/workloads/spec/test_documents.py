"""Lengths of packed documents: what a user may write, and what is drawn from it on every rank."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.spec.documents.lengths import canonical_documents, packed
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment, from_json, to_json

DRAWN = {"kind": "lognormal", "mean": 1500, "sigma": 1.2, "seed": 7}
TEXT = "lognormal mean=1500 sigma=1.2 seed=7"


def case(**fields: Any) -> Experiment:
    return Experiment.canonical(model=LLAMA_8B, **{"global_batch_size": 8, "seq_len": 4096, **fields})


def test_a_mapping_and_its_text_are_one_experiment() -> None:
    assert canonical_documents(DRAWN) == canonical_documents(TEXT) == TEXT
    assert canonical_documents("lognormal mean=1500 sigma=1.2") == canonical_documents(
        {"kind": "lognormal", "mean": 1500, "sigma": 1.2}
    )
    assert case(documents=DRAWN) == case(documents=TEXT)
    assert from_json(to_json(case(documents=DRAWN))) == case(documents=TEXT)


def test_a_file_is_named_by_a_mapping_or_a_text(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n9\n4\n")
    assert canonical_documents(f"file path={file}") == canonical_documents({"kind": "file", "path": str(file)})
    with pytest.raises(InvalidExperiment, match=r"cannot read '.*gone\.txt': No such file"):
        canonical_documents(f"file path={tmp_path / 'gone.txt'}")


def test_whole_sequences_keep_the_hashes_that_they_had() -> None:
    plain = case()
    assert plain.documents is None and "packed" not in plain.id
    assert plain.hash == case(document_balance="greedy").hash, "a balance has no effect without documents"
    assert '"documents": null' in to_json(plain)
    assert len({plain.hash, case(documents=DRAWN).hash, case(documents=DRAWN, document_balance="greedy").hash}) == 3
    assert "-packed.greedy-" in case(documents=DRAWN, document_balance="greedy").id


def test_sequences_are_filled_with_whole_documents_and_the_last_one_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n9\n4\n")
    text = canonical_documents({"kind": "file", "path": str(file)})
    assert text is not None
    # 3 9 (4 cut to 0: there is no room) is full at 12; the next sequence begins with the next document
    assert packed(text, 12, 3) == ((3, 9), (4, 3, 5), (4, 3, 5))
    assert packed(text, 2, 4) == ((2,), (2,), (2,), (2,))


def test_a_sequence_does_not_depend_on_how_many_there_are() -> None:
    assert packed(TEXT, 4096, 3) == packed(TEXT, 4096, 64)[:3]
    assert packed(TEXT, 4096, 3) != packed(TEXT.replace("seed=7", "seed=8"), 4096, 3)


def test_drawn_lengths_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    lengths = [n for held in packed("lognormal mean=300 sigma=0.8 seed=1", 10**6, 20) for n in held[:-1]]
    assert statistics.fmean(lengths) == pytest.approx(300, rel=0.02)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(0.8, rel=0.02)
    assert {n for held in packed("lognormal mean=64 sigma=0 seed=1", 256, 4) for n in held} == {64}


def test_lengths_are_equal_in_another_process() -> None:
    code = f"from workloads.spec.documents.lengths import packed; print(packed({TEXT!r}, 4096, 5))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(packed(TEXT, 4096, 5))


def test_a_hash_is_over_the_lengths_of_a_file_and_not_over_its_path(tmp_path: Path) -> None:
    first, same, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    first.write_text("100\n200\n")
    same.write_text("100\n200")
    other.write_text("200\n100\n")
    hashes = [case(documents={"kind": "file", "path": str(one)}).hash for one in (first, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n200\n")
    text = canonical_documents({"kind": "file", "path": str(file)})
    assert text is not None
    changed = text.replace("digest=", "digest=" + "0" * 16)[: len(text) + 16]
    with pytest.raises(InvalidExperiment, match="must be null"):
        canonical_documents(changed)
    other = text[: text.index("digest=") + 7] + "0" * 16 + text[text.index(" path=") :]
    for reader in (canonical_documents, lambda stored: packed(stored, 64, 1)):
        with pytest.raises(InvalidExperiment, match="no longer has the lengths"):
            reader(other)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (5, "must be null, {kind: lognormal"),
        ("every 5", "must be null, {kind: lognormal"),
        ({"kind": "normal", "mean": 5}, "must be null, {kind: lognormal"),
        ({"kind": "lognormal", "mean": 5}, "kind=lognormal has the fields mean, seed, sigma"),
        ({**DRAWN, "median": 5}, "kind=lognormal has the fields mean, seed, sigma"),
        ({**DRAWN, "mean": 0}, "mean=0 must be a number of tokens of at least 1"),
        ({**DRAWN, "sigma": -1}, "sigma=-1 a number from 0 to 10"),
        ({**DRAWN, "seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"kind": "file"}, "kind=file has the fields path"),
        ({"kind": "file", "path": "/nowhere/lengths.txt"}, "cannot read '/nowhere/lengths.txt'"),
    ],
)
def test_other_values_are_refused(written: object, said: str) -> None:
    with pytest.raises(InvalidExperiment, match=said.replace("{", "[{]")):
        canonical_documents(written)


@pytest.mark.parametrize(("text", "said"), [("5\nx\n", "line 2"), ("5\n0\n", "line 2"), ("", "has 0 lengths")])
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(InvalidExperiment, match=said):
        canonical_documents({"kind": "file", "path": str(file)})
