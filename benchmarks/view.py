"""What the dashboard costs: bytes, seconds until it shows, the reader's processor and memory, the head's pace.

    python benchmarks/view.py            # a quarter of an hour
    python benchmarks/view.py --quick    # small runs and one of each, to see that it works

    page      bytes of everything that a page loads: as they are, as they are sent, and as gzip would send them; seconds
              from the address to the first paint and to the charts, in Chromium (.venv-browser/bin/python has selenium
              after `make test-foreign FOREIGN=browser`; where it is not there, the figures say so)
    step      seconds from a step that is appended to the run directory until an open page is told of it, and until
              Chromium shows it
    jank      while a step comes each half second: the page's main thread for each step (its processor's seconds), and
              tasks of it that were long, of 50 ms and more of the clock
    reader    the share of a core that `echo2 view` takes, its memory, and bytes that it sends: with no page open; with
              one, while nothing is written (`still`), while status.json is replaced as a head does (`told`), and with
              a step a second and looks for rollouts besides (`steps`)
    head      a real head with workers that answer at once (`head_load.py`), in turn with no page open and with ten:
              groups by its own processor time and by the clock

The first three are on run directories of their own: a small one, one of 10,000 steps, one of 10,000 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from head_load import RealHead, at_work, cpu_seconds, mebibytes
from recording import HERE, quantile, save
from two_commits import compare
from view_pages import NAMES, PATIENCE_SECONDS, Served, listen, serve, weigh

sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "unit")]

import browser_page  # noqa: E402
import view_cases  # noqa: E402
from echo2.rundir import RunDir  # noqa: E402
from echo2.views.watch import LOOK_SECONDS  # noqa: E402

NUM_VIEWERS = 10
#: Between two writings of status.json by a head.
STATUS_SECONDS = 0.5
#: Between two looks of a page for new rollouts (`rollouts.js`).
FOLLOW_SECONDS = 2.0
#: As many groups, samples and tokens as a step's file of rollouts has at most, token by token.
LOGGED = {"num_groups": 4, "num_tokens": 1024}
#: Notes when the charts are there, and when the step that is shown changes.
OBSERVER = """new MutationObserver(() => {
  if (!window.drawn && document.querySelectorAll("#charts canvas").length > 5) window.drawn = performance.now();
  const step = document.querySelector("#facts dd")?.textContent;
  if (step !== window.step) { window.step = step; window.stepped = Date.now(); }
}).observe(document, {childList: true, subtree: true, characterData: true});
window.long = [];
new PerformanceObserver((list) => window.long.push(...list.getEntries().map((each) => each.duration)))
  .observe({type: "longtask", buffered: true});"""
#: Of rollouts for the head: as `head_load.py` has them.
LOAD = Namespace(samples=8, tokens=32, batch=8, step=128, sampling_seconds=0.0, join_seconds=120.0, profile="")
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How long each part is measured, and on what. `runs`: steps and workers, by name."""

    runs: dict[str, tuple[int, int]]
    num_loads: int  # of the page
    num_appended: int
    rounds: int
    seconds: float  # of each round
    workers: int  # at the head


FULL = Size({"small": (200, 6), "10,000 steps": (10_000, 6), "10,000 workers": (200, 10_000)}, 10, 20, 6, 8.0, 10)
QUICK = Size({"small": (20, 6), "500 workers": (20, 500)}, 2, 3, 1, 1.0, 2)


# ---- the page and its steps ------------------------------------------------------------------------------------------


def time_page(page: browser_page.Page, size: Size) -> Figures:
    """Seconds from the address to the first paint, and to the charts; each load is of everything: nothing is cached."""
    paints, charts = [], []
    for _ in range(size.num_loads):
        page.open()
        page.until("performance.getEntriesByName('first-paint').length && window.drawn")
        paints.append(page.ask("performance.getEntriesByName('first-paint')[0].startTime") / 1000)
        charts.append(page.ask("window.drawn") / 1000)
    return {"first_paint_seconds": spread(paints), "charts_seconds": spread(charts)}


def prepare_step(rundir: RunDir, step: int, num_workers: int) -> Callable[[], None]:
    """Writes a step as a head does, at once: of 10,000 workers, to make the text takes longer than to write it."""
    row = json.dumps(view_cases.row(step, random.Random(step))) + "\n"
    told, new = json.dumps(view_cases.status(step, num_workers)), rundir.status.with_suffix(".new")

    def write() -> None:
        with rundir.metrics.open("a") as file:
            file.write(row)
        new.write_text(told)
        new.replace(rundir.status)

    return write


async def time_steps(rundir: RunDir, step: int, num_workers: int, served: Served, size: Size) -> Figures:
    """Of steps that come at any moment between two looks at the directory."""
    rng, taken = random.Random(0), []
    async with listen(served) as listener:
        for number in range(step, step + size.num_appended):
            write = prepare_step(rundir, number, num_workers)
            await asyncio.sleep(rng.uniform(0, LOOK_SECONDS))
            begin = time.perf_counter()
            write()
            taken.append(await listener.until_step(number) - begin)
    return spread(taken)


def show_steps(page: browser_page.Page, rundir: RunDir, step: int, num_workers: int, size: Size) -> Figures:
    """The same until Chromium has the step's number on the page."""
    rng, taken = random.Random(1), []
    for number in range(step, step + size.num_appended):
        write = prepare_step(rundir, number, num_workers)
        time.sleep(rng.uniform(0, LOOK_SECONDS))
        begin = time.time()
        write()
        page.until(f"window.stepped >= {1000 * begin}")
        taken.append(page.ask("window.stepped") / 1000 - begin)
    return spread(taken)


def measure_jank(page: browser_page.Page, rundir: RunDir, step: int, num_workers: int, size: Size) -> Figures:
    """What steps cost the page that shows them, a step with each writing of the status."""
    page.ask("window.long.splice(0), null")
    begin, before = time.monotonic(), task_seconds(page)
    for turn in range(size.num_appended):
        prepare_step(rundir, step + turn, num_workers)()
        time.sleep(max(0.0, begin + (turn + 1) * STATUS_SECONDS - time.monotonic()))
    page.until(f"document.querySelector('#facts dd').textContent.replaceAll(',', '').startsWith('{step + turn} ')")
    spent, long = task_seconds(page) - before, page.ask("window.long")
    return {
        "main_thread_seconds_per_step": round(spent / size.num_appended, 4),
        "long_tasks": len(long),
        "longest_task_ms": round(max(long, default=0.0)),
    }


def task_seconds(page: browser_page.Page) -> float:
    """Of the processor, by the tasks of the page's main thread so far."""
    page.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    metrics = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


# ---- the reader ------------------------------------------------------------------------------------------------------


async def load_reader(rundir: RunDir, step: int, num_workers: int, served: Served, size: Size) -> Figures:
    """With no page open, then with one; the kinds of writing take turns. Bytes are those of the events."""
    found: Figures = {"mebibytes_before": mebibytes(served.pid)}
    nobody = await measure_reader(served, size, writing(rundir, step, num_workers, "told"))
    rounds: dict[str, list[Figures]] = {"still": [], "told": [], "steps": []}
    async with listen(served) as listener, doing(listener.forever()):
        for _ in range(max(1, size.rounds // 2)):
            for kind, figures in rounds.items():
                before = listener.num_bytes
                async with doing(*([follow(served)] if kind == "steps" else [])):
                    figures.append(await measure_reader(served, size, writing(rundir, step, num_workers, kind)))
                figures[-1]["bytes_per_second"] = (listener.num_bytes - before) / figures[-1].pop("seconds")
                step += int(size.seconds) + 1
    found["nobody"] = {"share_of_core": round(nobody["share_of_core"], 4)}
    for kind, figures in rounds.items():
        found[kind] = {key: spread([one[key] for one in figures]) for key in figures[0]}
    return {**found, "mebibytes_after": mebibytes(served.pid)}


@asynccontextmanager
async def doing(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While something else is measured.

    Raises:
        RuntimeError: it ended before that did.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        if any(task.done() for task in tasks):
            raise RuntimeError("a page was let go, or could not be told")
    finally:
        for task in tasks:
            task.cancel()


async def follow(served: Served) -> None:
    """As an open page does while steps come: it asks for the rollouts of the newest."""
    names = json.loads((await served.get(NAMES)).partition(b"\r\n\r\n")[2])
    while True:
        await served.get(f"{NAMES}&name={names[0] if names else 'step_1'}")
        await asyncio.sleep(FOLLOW_SECONDS)


async def measure_reader(served: Served, size: Size, writer: AsyncIterator[None]) -> Figures:
    begin, before = time.perf_counter(), cpu_seconds(served.pid)
    until = begin + size.seconds
    async for _ in writer:
        if time.perf_counter() >= until:
            break
    seconds = time.perf_counter() - begin
    return {"share_of_core": (cpu_seconds(served.pid) - before) / seconds, "seconds": seconds}


async def writing(rundir: RunDir, step: int, num_workers: int, kind: str) -> AsyncIterator[None]:
    """What a head writes while it stands still, while it lives, and while it trains a step a second; twice a second."""
    begin, turn = time.perf_counter(), 0
    while True:
        number = step + 1 + turn // 2 if kind == "steps" else step
        if kind == "steps" and turn % 2 == 0:
            view_cases.append_step(rundir, number, num_workers)
        elif kind != "still":
            view_cases.write_status(rundir, number, num_workers)
        turn += 1
        await asyncio.sleep(max(0.0, begin + turn * STATUS_SECONDS - time.perf_counter()))
        yield


async def look_at(name: str, folder: Path, size: Size, driver: Any) -> Figures:
    """All that is measured on one run directory. Each part goes on with the steps where the one before it ended."""
    num_steps, num_workers = size.runs[name]
    rundir = view_cases.make_run(folder / "run", num_steps, num_workers)
    for number in range(num_steps):
        (rundir.rollouts / f"step_{number}.jsonl").touch()  # each step leaves a file
    view_cases.log_groups(rundir, num_steps, **LOGGED)
    found: Figures = {"steps": num_steps, "workers": num_workers}
    with serve(rundir.path) as served:
        found["page"] = await weigh(served, f"step_{num_steps}")
        found["step_seconds"] = await time_steps(rundir, num_steps + 1, num_workers, served, size)
        step = num_steps + size.num_appended
        if driver is not None:
            page = browser_page.Page(driver, served.address)
            found["page"] |= time_page(page, size)
            found["shown_seconds"] = show_steps(page, rundir, step + 1, num_workers, size)
            step += size.num_appended
            found["jank"] = measure_jank(page, rundir, step + 1, num_workers, size)
            driver.get("about:blank")
            step += size.num_appended
    with serve(rundir.path) as served:
        found["reader"] = await load_reader(rundir, step, num_workers, served, size)
    return found


# ---- the head --------------------------------------------------------------------------------------------------------


class Marks(list[tuple[int, float]]):
    """Steps as the head records them, to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Event()

    def append(self, mark: tuple[int, float]) -> None:
        """A step is recorded: so many groups, at this time."""
        super().append(mark)
        self._came.set()

    async def next(self) -> float:
        """When the next step was recorded."""
        self._came.clear()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._came.wait()
        return self[-1][1]


async def pace(head: RealHead, served: Served, marks: Marks, seconds: float) -> dict[str, float]:
    """Over whole steps, for about so long."""
    pids = head.process.pid, served.pid
    begin = end = await marks.next()
    before, first = [cpu_seconds(pid) for pid in pids], len(marks)
    while end < begin + seconds:
        end = await marks.next()
    cpu, view_cpu = (cpu_seconds(pid) - one for pid, one in zip(pids, before, strict=True))
    groups = sum(number for number, _ in marks[first:])
    return {
        "groups_per_cpu_second": groups / cpu,
        "groups_per_second": groups / (end - begin),
        "head_share_of_core": cpu / (end - begin),
        "view_share_of_core": view_cpu / (end - begin),
    }


async def slow_head(folder: Path, size: Size) -> Figures:
    """The head's pace without pages and with ten, in turn; which is first changes from round to round."""
    head, marks = RealHead(folder, size.workers, LOAD), Marks()
    alone: list[dict[str, float]] = []
    watched: list[dict[str, float]] = []
    try:
        with serve(head.run) as served:
            async with at_work(head, size.workers, LOAD, marks):
                await pace(head, served, marks, size.seconds)  # the first seconds are slow
                for number in range(size.rounds):
                    for side in (alone, watched) if number % 2 == 0 else (watched, alone):
                        async with AsyncExitStack() as pages:
                            for _ in range(NUM_VIEWERS if side is watched else 0):
                                listener = await pages.enter_async_context(listen(served))
                                await pages.enter_async_context(doing(listener.forever(), follow(served)))
                            side.append(await pace(head, served, marks, size.seconds))
    finally:
        head.close()
    found = compare(alone, watched)
    sides = {key: {"alone": one.pop("old"), "watched": one.pop("new"), **one} for key, one in found.items()}
    return {"workers": size.workers, "viewers": NUM_VIEWERS, "compared": sides, "alone": alone, "watched": watched}


# ---- all of it -------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> Figures:
    return {
        "p50": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "p95": round(quantile(list(values), 0.95), 4),
        "of": len(values),
    }


def start_browser() -> tuple[Any, str]:
    """Chromium, or why there is none."""
    if browser_page.CHROMIUM is None or browser_page.DRIVER is None:
        return None, "not measured: no chromium with its driver is here"
    try:
        driver = browser_page.chromium()
    except ImportError:
        return None, "not measured: selenium is not installed for this Python"
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": OBSERVER})
    return driver, f"Chromium {driver.capabilities['browserVersion']}, headless"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, once, and nothing is written unless --out is said")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    driver, what = start_browser()
    found: Figures = {"browser": what, "runs": {}}
    try:
        for name in size.runs:
            with tempfile.TemporaryDirectory(prefix="echo2-view-") as folder:
                found["runs"][name] = asyncio.run(look_at(name, Path(folder), size, driver))
                print(name, json.dumps(found["runs"][name], indent=1), flush=True)
    finally:
        if driver is not None:
            driver.quit()
    with tempfile.TemporaryDirectory(prefix="echo2-view-", ignore_cleanup_errors=True) as folder:
        found["head"] = asyncio.run(slow_head(Path(folder), size))
    print("head", json.dumps(found["head"]["compared"], indent=1), flush=True)
    found["load_at_end"] = os.getloadavg()[0]
    if options.out or not options.quick:
        print(f"written to {save('view', found, options.out)}")


if __name__ == "__main__":
    main()
