"""The dashboard in a real browser: every view, live, on a phone, in the dark, by keyboard, against hostile words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import house
import view_cases
from browser_page import PHONE, WIDE, Page, view_of
from echo2.config.rundir import RunDir

LOOKS = [(size, scheme) for size in (WIDE, PHONE) for scheme in ("light", "dark")]


def test_every_view_says_what_the_run_directory_says(page: Page, rundirs: list[RunDir]) -> None:
    view_cases.write_status(rundirs[0], 120)  # anew: some of what it says is so many minutes from now
    page.open()
    page.until("document.querySelector('#causes').textContent.includes('expired')")  # the bill comes by itself
    facts = page.text("#facts")
    for words in ("step120 of 200", "staleness (bound)", "(2)", "workers6", "snapshot120", "checkpoint120"):
        assert words in facts
    assert page.text("#state") == "sorting: running"
    assert "holds 4 of 4 missing groups" in page.text("#waits")
    assert "in 8 min" in page.text("#waits")
    assert "at the end, in" in page.text("#bill")
    assert "version 120 at 5 of 6 workers" in page.text("#weights")
    assert "63 %" in page.text("#workers")
    assert "stranger" in page.text("#workers")
    cells = page.ask("[...document.querySelectorAll('#workers tbody tr')].map((row) => row.cells[1].textContent)")
    assert sorted(set(cells)) == ["llamacpp-q8_0", "vllm"]
    assert page.ask("document.querySelector('#workers tbody tr').cells[2].textContent") == "0.001"
    assert "t-77" in page.text("#trust")
    (first, second) = page.ask("[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.textContent)")
    assert "stands by, and 2 more" in first
    assert "10 min ago" in second
    assert page.ask("document.querySelectorAll('#map circle').length") == 7
    assert page.ask("document.querySelectorAll('#map line').length") == 7
    titles = page.ask("[...document.querySelectorAll('#charts h3')].map((each) => each.textContent)")
    assert titles[:3] == ["Reward", "Held-out sets", "pass@k"]
    assert len(titles) == 19
    assert page.text("#link") == "live"
    assert page.ask("document.querySelectorAll('#bar span').length") == 4
    assert "most of it for workers that sample" in page.text("#spent")
    assert page.ask("document.querySelectorAll('article').length") == 3
    assert page.complaints() == []


def figure(title: str) -> str:
    """The chart with this title, as an expression in the page."""
    titles = "[...document.querySelectorAll('#charts h3')]"
    return f"{titles}.find((each) => each.textContent === {title!r}).parentElement"


def legend(title: str) -> str:
    """What the newest point of a chart is, as an expression in the page: [name, value] of each line."""
    cells = "(each) => [...each.children].map((cell) => cell.textContent)"
    return f"[...{figure(title)}.querySelectorAll('.u-series')].map({cells})"


def test_sets_and_samples_of_an_evaluation_have_charts(page: Page) -> None:
    page.open()
    assert [name for name, _ in page.ask(legend("Held-out sets"))] == ["step", "easy", "hard"]
    assert [name for name, _ in page.ask(legend("pass@k"))] == ["step", "pass@2", "pass@4"]


def test_lines_can_be_smoothed_except_those_that_are_exact(page: Page) -> None:
    page.open()
    before = {title: page.ask(legend(title)) for title in ("Gradient norm", "Dollars")}
    page.choose("smoothing", "20")
    page.until(f"{figure('Gradient norm')}.textContent.includes('averaged over about 20 steps')")
    assert page.ask(legend("Gradient norm")) != before["Gradient norm"]
    assert page.ask(legend("Dollars")) == before["Dollars"]
    assert "averaged" not in page.ask(f"{figure('Dollars')}.textContent")


def test_charts_can_be_drawn_over_time(page: Page) -> None:
    page.open()
    page.choose("axis", "time")
    page.until(f"{legend('Reward')}[0][0] === 'after'")
    assert page.ask(legend("Reward"))[0][1] == "8 min"  # 120 steps of 4 s
    page.choose("axis", "step")
    page.until(f"{legend('Reward')}[0][0] === 'step'")


#: Keeps the texts that are drawn on each canvas.
NOTED_TEXTS = """window.texts = new Map();
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    if (!window.texts.has(this.canvas)) window.texts.set(this.canvas, []);
    window.texts.get(this.canvas).push(text);
    return draw.call(this, text, ...more);
};"""


def test_the_axis_of_a_constant_zero_goes_from_0_to_1(page: Page) -> None:
    """uPlot's own choice is 0 to 100, in which a share or a few cents would not be seen."""
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": NOTED_TEXTS})
    page.open()
    written = page.ask(f"window.texts.get({figure('Clipped tokens')}.querySelector('canvas'))")
    assert {"0.5", "1"} <= set(written)


def test_a_run_that_is_over_is_not_called_live(page: Page, rundirs: list[RunDir]) -> None:
    rundirs[0].outcome.write_text('{"kind": "finished", "reason": "all steps are trained"}')
    try:
        page.open()
        page.until("document.querySelector('#state').textContent.includes('finished')")
        assert page.text("#link") == "this run is not going on"
    finally:
        rundirs[0].outcome.unlink()


def test_the_page_shows_when_a_rate_is_unknown(page: Page, rundirs: list[RunDir]) -> None:
    page.open()
    assert "no “needed”" not in page.ask(f"{figure('Rollouts a second')}.textContent")
    rows = rundirs[0].metrics.read_text()
    rundirs[0].metrics.write_text(rows.replace('"fleet/needed_rate": 150.0, ', ""))
    try:
        page.open()
        words = "no “needed” now: no step was timed yet, or no number of workers is enough"
        page.until(f"{figure('Rollouts a second')}.textContent.includes('{words}')")  # the charts come by themselves
    finally:
        rundirs[0].metrics.write_text(rows)


def test_configuration_and_logs_can_be_opened(page: Page, rundirs: list[RunDir]) -> None:
    (rundirs[0].logs / "head.log").write_text(f"listening\n{view_cases.HOSTILE}\n")
    page.open()
    page.ask("document.querySelector('#configuration summary').click()")
    page.until("document.querySelector('#settings-told').textContent === 'All settings are as by default.'")
    page.ask("document.getElementById('defaults').click()")
    page.until("document.querySelector('#settings').textContent.includes('learner.lr')")
    page.ask("document.querySelector('#logs summary').click()")
    page.until("document.querySelector('#log-text').textContent.includes('listening')")
    assert "<script>" in page.text("#log-text")
    assert page.ask("window.owned === undefined")
    assert page.complaints() == []


def test_labels_of_the_map_are_not_struck_through(page: Page) -> None:
    page.open()
    struck = """(() => {
        const texts = [...document.querySelectorAll('#map text')].map((each) => [each.textContent, each.getBBox()]);
        const lines = [...document.querySelectorAll('#map line')].map(
            ({x1, x2, y1, y2}) => [x1, x2, y1, y2].map((each) => each.baseVal.value));
        const isStruck = (box) => lines.some(([x1, x2, y1, y2]) => y1 === y2 && y1 > box.y && y1 < box.y + box.height
            && x1 < box.x + box.width && x2 > box.x);
        return texts.filter(([, box]) => isStruck(box)).map(([text]) => text);
    })()"""
    assert page.ask(struck) == []


def test_rollouts_are_drawn_beyond_the_screen(page: Page) -> None:
    page.open(PHONE)
    unseen = "[...document.querySelectorAll('.words')]"
    unseen += ".filter((each) => !each.checkVisibility({contentVisibilityAuto: true}))"
    assert page.ask(f"{unseen}.length") == 0


def test_headings_of_tables_stay_whole_on_a_phone(page: Page) -> None:
    page.open(PHONE)
    lines = "{ const range = document.createRange(); range.selectNodeContents(each); return range.getClientRects(); }"
    broken = f"[...document.querySelectorAll('thead th')].filter((each) => ((each) => {lines})(each).length > 1)"
    assert page.ask(f"{broken}.map((each) => each.textContent)") == []


def test_a_new_step_appears_on_an_open_page(page: Page, rundirs: list[RunDir]) -> None:
    page.open()
    dollars = f"{figure('Dollars')}.querySelector('.u-legend').textContent"
    before = page.ask(dollars)
    step = int(page.text("#facts dd").split(" of ")[0]) + 1
    view_cases.log_groups(rundirs[0], step)
    view_cases.append_step(rundirs[0], step)
    page.until(f"document.querySelector('#facts dd').textContent === '{step} of 200'")
    page.until(f"document.querySelector('article').textContent.includes('step {step},')")
    page.until(f"document.querySelector('#charts .u-value').textContent === '{step}'")  # the charts come by themselves
    assert page.ask(dollars) != before


def test_unchanged_rows_are_not_redrawn(page: Page, rundirs: list[RunDir]) -> None:
    """A row of a table that somebody selects, and a button that has the focus, stay as the run goes on."""
    page.open()
    page.ask("window.kept = [...document.querySelectorAll('#workers tr, #waits tr, #facts dd')], null")
    step = int(page.text("#facts dd").split(" of ")[0]) + 1
    view_cases.append_step(rundirs[0], step)
    page.until(f"document.querySelector('#facts dd').textContent === '{step} of 200'")
    assert page.ask("window.kept.filter((each) => each.isConnected && each.tagName === 'TR').length") == 10
    assert page.ask("window.kept.filter((each) => each.isConnected && each.tagName === 'DD').length") >= 4


#: Puts the pointer on the step of that number, and reads the legend below: [name, value] of each line.
LEGEND_AT = """(() => {
    const titles = [...document.querySelectorAll('#charts h3')];
    const figure = titles.find((each) => each.textContent === 'TITLE').parentElement;
    const over = figure.querySelector('.u-over'), box = over.getBoundingClientRect();
    const read = () => [...figure.querySelectorAll('.u-series')].map(
        (each) => [...each.children].map((cell) => cell.textContent));
    for (let x = 0; x < box.width && read()[0][1] !== 'STEP'; x++)
        over.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + x, clientY: box.top + 9, bubbles: true}));
    return read();
})()"""


def legend_at(page: Page, title: str, step: int) -> dict[str, str]:
    """What the legend of a chart says with the pointer on a step."""
    (name, at), *lines = page.ask(LEGEND_AT.replace("TITLE", title).replace("STEP", str(step)))
    assert (name, at) == ("step", str(step))
    return dict(lines)


@pytest.mark.parametrize(("step", "is_evaluated"), [(30, False), (40, True)])
def test_the_pointer_between_two_evaluations_reads_no_held_out_reward(
    page: Page, step: int, is_evaluated: bool
) -> None:
    """The newest value would stand for a step that was not evaluated."""
    page.open()
    found = legend_at(page, "Reward", step)
    assert 0.0 < float(found["reward"]) < 1.0
    assert (found["held-out reward"] != "–") == is_evaluated


@pytest.mark.parametrize(("step", "cause"), [(30, "leases lost"), (31, "workers sample")])
def test_the_chart_shows_why_the_learner_waited_at_a_step(page: Page, step: int, cause: str) -> None:
    page.open()
    seconds = {name: float(value) for name, value in legend_at(page, "Why the learner waited", step).items()}
    assert max(seconds, key=seconds.__getitem__) == cause
    assert set(seconds) == {"workers sample", "rewards", "leases lost"}  # the learner waited for nothing else


def test_a_worker_of_thousands_is_found(page: Page, rundirs: list[RunDir]) -> None:
    view_cases.write_status(rundirs[0], 120, num_workers=1200)
    try:
        page.open()
        page.until("document.querySelector('#which').textContent.startsWith('1 to 50 of 1,200;')")
        shown = "[...document.querySelectorAll('#workers tbody tr')].map((each) => each.cells[0].textContent)"
        first = page.ask(shown)
        page.ask("document.getElementById('later').click()")
        page.until("document.querySelector('#which').textContent.startsWith('51 to 100 of 1,200;')")
        assert not set(first) & set(page.ask(shown))
        page.choose("find", "machine-1199")
        page.until("document.querySelector('#which').textContent.startsWith('1 to 1 of 1 ')")
        assert page.ask(f"{shown}.length") == 1
        page.choose("find", "")
        page.until("document.querySelector('#which').textContent.startsWith('1 to 50 of 1,200;')")
        assert page.ask(shown) == first
        assert page.complaints() == []
    finally:
        view_cases.write_status(rundirs[0], 120)


def test_text_of_strangers_is_shown_as_text_and_not_as_markup(page: Page) -> None:
    page.open()
    page.until("document.querySelectorAll('article')[2]")
    assert view_cases.HOSTILE in page.text("article:nth-of-type(3) pre")
    assert view_cases.HOSTILE in page.text("article:nth-of-type(3) .tries")
    assert page.text("article:nth-of-type(3) .columns") == f"answer: {view_cases.HOSTILE}"
    assert "<script>" in page.text("#waits")
    assert page.ask("window.owned === undefined")
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert page.ask("document.querySelectorAll('body script').length") == 0
    assert page.complaints() == []


def test_rollouts_are_found_by_worker_staleness_and_reward(page: Page) -> None:
    page.open()
    count = "document.querySelectorAll('.rollout').length"
    assert page.ask(count) == 12
    page.choose("reward-from", "0.5")
    assert page.ask(count) == 6
    page.choose("worker", "w-1")
    assert page.ask(count) == 2
    page.choose("worker", "")
    page.choose("staleness", "1")
    assert page.ask("document.querySelectorAll('article').length") == 1
    page.choose("reward-from", "7")
    assert "No rollout is like that." in page.text("#groups")


def test_tokens_are_coloured_by_logprob_ratio_advantage_and_version(page: Page) -> None:
    page.open()
    kinds = (
        "[...new Set([...document.querySelectorAll('.words span')].map((each) => each.className.split('-')[0]))].sort()"
    )
    assert page.ask(kinds) == ["bad", "environment", "tint"]
    page.choose("colour", "ratio")
    assert page.ask(kinds) == ["bad", "environment", "good", "tint"]
    assert "likelier" in page.text("#legend")
    page.choose("colour", "advantage")
    assert page.ask(kinds) == ["bad", "environment", "good"]
    page.choose("colour", "version")
    assert page.ask(kinds) == ["environment", "version"]
    shades = "[...document.querySelectorAll('.words')].map((each) => getComputedStyle(each.firstChild).backgroundColor)"
    assert len(set(page.ask(shades))) == 2


def test_one_task_over_the_steps(page: Page) -> None:
    page.open()
    page.ask("document.querySelector('article button').click()")
    page.until("document.querySelector('#groups').textContent.includes('One task over')")
    assert page.ask("document.querySelectorAll('article').length") >= 5
    assert page.ask("new Set([...document.querySelectorAll('article pre')].map((each) => each.textContent)).size") == 1
    page.ask("document.querySelector('#groups > button').click()")
    page.until("document.querySelectorAll('article').length === 3")


def test_runs_side_by_side(page: Page) -> None:
    page.open()
    buttons = "[...document.querySelectorAll('#runs button')]"
    page.until(f"{buttons}.length === 3")
    assert page.ask(f"{buttons}.map((each) => each.textContent)") == ["sorting", "sums", "side by side"]
    page.ask(f"{buttons}[2].click()")
    page.until("document.querySelector('#charts .u-legend').textContent.includes('sums')")
    names = [name for name, _ in page.ask(legend("Reward"))]
    assert names == ["step", "sorting", "sorting: held-out reward", "sums", "sums: held-out reward"]
    sets = [name for name, _ in page.ask(legend("Held-out sets"))]
    assert sets == ["step", *(f"{run}: {each}" for run in ("sorting", "sums") for each in ("easy", "hard"))]
    rows = "[...document.querySelectorAll('#compare tbody tr')].map((each) => each.textContent)"
    assert [row[:4] for row in page.ask(rows)] == ["sort", "sums"]
    assert all(" at step " in row for row in page.ask(rows))
    page.ask(f"{buttons}[1].click()")
    page.until("document.querySelector('#state').textContent === 'sums: running'")
    assert page.ask("document.getElementById('compared').hidden")


def test_everything_can_be_done_by_keyboard(page: Page) -> None:
    page.open()
    page.press("\ue004")  # Tab
    assert page.ask("document.activeElement.className") == "skip"
    page.press("\ue007")  # Enter
    page.until("document.activeElement.id === 'rollouts'")
    page.press("j", "j")
    focused = "[...document.querySelectorAll('.words')].indexOf(document.activeElement)"
    assert page.ask(focused) == 1
    page.press("k")
    assert page.ask(focused) == 0
    page.press("\ue014", "\ue014")  # right
    assert page.text("#token").startswith("token 2 ")
    assert "logprob" in page.text("#token")
    assert ", ratio " in page.text("#token")
    before = page.text("article .about")
    page.press("[", "[", "[")  # one of the first two may be the step that is shown
    page.until(f"document.querySelector('article .about').textContent !== {before!r}")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_page_fits_small_screens_and_is_accessible(
    page: Page, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    page.open(size, scheme)
    width = size[0]
    assert page.ask("document.documentElement.scrollWidth") <= width
    wider = "[...document.querySelectorAll('h2, p, dl, figure, article, .filters')]"
    wider += ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1)"
    assert page.ask(f"{wider}.map((each) => each.outerHTML.slice(0, 80))") == []
    back = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(back[:3]) < 200) == (scheme == "dark")
    page.picture(f"view-{'phone' if size == PHONE else 'wide'}-{scheme}", tmp_path)
    for violation in page.violations():
        assert violation["impact"] not in ("serious", "critical"), violation


@pytest.mark.skipif("ECHO2_PICTURES" not in os.environ, reason="ECHO2_PICTURES names no run")
@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_pictures_of_a_run_are_made(driver: Any, size: tuple[int, int], scheme: str) -> None:
    """The pictures in docs/, of the run directory that ECHO2_PICTURES names."""
    with view_of(Path(os.environ["ECHO2_PICTURES"])) as address:
        page = Page(driver, address)
        page.open(size, scheme)
        page.picture(f"view-{'phone' if size == PHONE else 'wide'}-{scheme}", house.REPOSITORY / "docs")
        if (size, scheme) == (WIDE, "light"):  # for the README
            page.picture("view-top", house.REPOSITORY / "docs", 1290)


def test_a_browser_without_the_token_learns_where_to_find_it(page: Page) -> None:
    page.driver.delete_all_cookies()
    page.driver.get(page.address.partition("?")[0])
    page.driver.delete_all_cookies()
    page.driver.get(page.address.partition("?")[0])
    assert "Open the address that the command printed" in page.text("body")
