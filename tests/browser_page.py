"""The dashboard in a browser, with what its tests and its benchmark ask of it."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import house

WIDE, PHONE = (1280, 900), (390, 844)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(os.environ.get("AXE_CORE", house.REPOSITORY / ".venv-browser/package/axe.min.js"))
DRIVER = shutil.which("chromedriver")


def chromium() -> Any:
    """Chromium without a window; what its console says is kept. It and selenium must be here."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(DRIVER))


@contextmanager
def view_of(*directories: Path) -> Iterator[str]:
    """Serve the page of these runs. Yields its address."""
    command = [sys.executable, "-m", "echo2", "view", *map(str, directories)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


class Page:
    """The dashboard in a browser, over run directories, with what tests ask of it."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
        """Load it anew, in this size and colour scheme, and wait until it shows a run."""
        self.dress(size, scheme)
        self.driver.get_log("browser")
        self.driver.get(self.address)
        self.until("document.querySelectorAll('#charts canvas').length > 5 && document.querySelector('.words')")

    def dress(self, size: tuple[int, int], scheme: str) -> None:
        """Show it in this size and colour scheme."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def ask(self, script: str, *arguments: Any) -> Any:
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def until(self, condition: str) -> Any:
        """Wait until an expression is true in the page."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 60, 0.1).until(lambda _: self.ask(condition), condition)

    def text(self, selector: str) -> str:
        """What an element says."""
        found: str = self.ask("document.querySelector(arguments[0]).textContent", selector)
        return found

    def press(self, *keys: str) -> None:
        """Keys, to whatever has the focus."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def choose(self, name: str, value: str) -> None:
        """Set a filter as a person would."""
        script = (
            "(([id, value]) => { const each = document.getElementById(id); each.value = value;"
            "each.dispatchEvent(new Event('input', {bubbles: true})); each.dispatchEvent(new Event('change')); })"
        )
        self.ask(f"{script}(arguments)", name, value)

    def complaints(self) -> list[str]:
        """What the console says against the page."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def violations(self) -> list[dict[str, Any]]:
        """What axe-core says against the page."""
        if not AXE.is_file():
            pytest.skip(f"axe-core is not at {AXE}: `make test-foreign` fetches it by npm")
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
        found: dict[str, Any] = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        return [
            {key: violation[key] for key in ("id", "impact", "help")}
            | {"where": [n["html"][:200] for n in violation["nodes"]]}
            for violation in found["violations"]
        ]

    def picture(self, name: str, path: Path, height_max: int = 4000) -> None:
        """The page as a picture, from its top."""
        height = self.ask(f"Math.min(document.documentElement.scrollHeight, {height_max})")
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = {"captureBeyondViewport": True, "clip": clip, "format": "webp", "quality": 70}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
        (path / f"{name}.webp").write_bytes(base64.b64decode(data))
