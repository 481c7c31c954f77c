"""Locks: one holder at a time, who is named, and nobody held by a process that is gone."""

import subprocess
import sys

import pytest

from learnkv.locks import alone, lock_of


def test_a_folder_is_held_to_the_end_of_the_block_and_the_second_is_told_by_whom(tmp_path):
    folder = tmp_path / "run"
    with alone(folder, "training into"), pytest.raises(ValueError, match=f"another process is training into {folder}; wait for it"):
        alone(folder, "training into")
    with alone(folder, "training into"):
        pass


def test_a_file_is_held_for_as_long_as_the_result_is_kept(tmp_path):
    held = alone(tmp_path / "rows.jsonl", "writing rows to", "give another evaluate.out")
    with pytest.raises(ValueError, match=r"writing rows to .*rows\.jsonl; give another evaluate\.out"):
        alone(tmp_path / "rows.jsonl", "writing rows to", "give another evaluate.out")
    del held
    alone(tmp_path / "rows.jsonl", "writing rows to")


def test_a_link_to_a_folder_is_that_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with alone(tmp_path / "real", "recording into"), pytest.raises(ValueError, match="recording into"):
        alone(tmp_path / "link", "recording into")


def test_what_a_killed_process_held_is_free(tmp_path):
    held = f"import os, pathlib; from learnkv.locks import alone; x = alone(pathlib.Path({str(tmp_path / 'run')!r}), 'at'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", held]).returncode == 9
    with lock_of(tmp_path / "run"):
        pass
