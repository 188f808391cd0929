"""Kills, a few of each; in one test, for what runs the command takes seconds to begin."""

import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults import samples
from faults.jobs import Known, answer, fresh
from faults.kills import at_calls, at_times, obeyed, probe, tried
from faults.nursery import crew
from faults.site import serving


def test_killed_anywhere_it_goes_on_as_if_it_had_not_been(tmp_path):
    draw = random.Random(0)
    with crew(1) as people, serving(samples.archive()) as url:
        known = Known(people, tmp_path)
        training, recording = known.training(), known.recording()
        usual = probe(people, training, tmp_path)
        rows = [
            (training, at_times("time", 2, usual.seconds, draw)),
            (training, at_calls("save", 2, usual.calls, "write .epoch-", draw)),
        ]
        for job, word in (
            (recording, "records.jsonl"),
            (known.report(), "page.html"),
            (known.fetching(), "write"),
        ):
            calls = probe(people, job, tmp_path, url=url).calls
            rows.append((job, at_calls("call", 1, calls, word, draw)))
        kills = 0
        for job, cases in rows:
            for case in cases:
                outcome = tried(people, job, tmp_path, case, url=url)
                assert outcome.trouble is None, (job.name, case)
                kills += outcome.kills
        assert kills >= 5

        # A program that writes in the place of a file is found out.
        kept = known.report()
        root = fresh(kept, tmp_path, "careless")
        calls = answer(people, kept, root, careless=True).calls
        shutil.rmtree(root.parent)
        (case,) = at_calls("careless", 1, calls, "write page.html", random.Random(1))
        number, _ = case.fates[0]["kill"]
        outcome = tried(
            people,
            kept,
            tmp_path,
            replace(case, fates=[{"kill": (number, "half"), "careless": True}]),
        )
        assert outcome.trouble == "after the kill, half of page.html"

        # Those that can be answered are.
        for signalled in (signal.SIGTERM, signal.SIGINT):
            root = fresh(training, tmp_path, signalled.name)
            made = answer(people, training, root, after=0.6 * usual.seconds, signal=signalled)
            assert obeyed(made, signalled, root) is None
            assert answer(people, training, root).status == 0
            assert training.done(root) is None
