"""A headless Chromium for tests of pages, which records every request and console message."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
"""How long a page may take to reach what a test waits for, on a busy machine."""
_NAME = "e => e.id || e.getAttribute('data-sort') || `${e.tagName} ${e.textContent.trim()}`"
"""A function of JavaScript: the name of an element for tests."""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--disable-dev-shm-usage",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own profile. Skips the test where Chromium or its driver is not installed."""
    binary = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip(f"{'chromium' if binary is None else 'chromedriver'} is not installed (Debian: chromium-driver)")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        driver.set_script_timeout(PATIENCE_S)
        try:
            yield Browser(driver)
        finally:
            driver.quit()


class Browser:
    """What tests do with a page, in short words."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, fragment: str = "", *, size: tuple[int, int] = (1400, 900), dark: bool = False) -> None:
        """Load a file from disk, afresh, in a viewport of ``size`` CSS pixels."""
        self.driver.get("about:blank")
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.requests(), self.console()
        self.driver.get(page.resolve().as_uri() + fragment)

    def requests(self) -> list[str]:
        """Addresses asked for since the last call; what the page itself holds (data:, blob:) is not asked for."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                found.append(message["params"]["url"])
        return [url for url in found if not url.startswith(("data:", "blob:", "about:"))]

    def console(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def js(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; arguments are ``arguments[0]`` and so on."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def wait(self, script: str) -> Any:
        """Wait until the expression is true."""
        return until(lambda: self.js(script), script)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """All text of the element, also what is scrolled away."""
        return str(self.js("document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        """Keys one after the other, to whatever has the focus."""
        actions = ActionChains(self.driver, duration=0)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def focused(self) -> str:
        """Id, or else tag and text, of the element with the focus."""
        return str(self.js(f"({_NAME})(document.activeElement)"))

    def focused_by_tab(self, until: str, most: int = 500) -> list[str]:
        """What gets the focus one after the other while Tab is pressed, up to the element ``until``, which has it at
        the end. Many keys are sent at once, and those too many are taken back by Shift and Tab."""
        self.js(
            f"void (window.focusOrder = [], document.addEventListener('focusin', ({{target: e}}) => "
            f"window.focusOrder.push([({_NAME})(e), e.matches(arguments[0])])))",
            until,
        )
        order: list[tuple[str, bool]] = []
        while not any(there for _, there in order):
            assert len(order) < most, f"{until} is not reached: {order}"
            self.press(*[Keys.TAB] * 25)
            order = self.js("window.focusOrder")
        at = [there for _, there in order].index(True)
        back = ActionChains(self.driver, duration=0).key_down(Keys.SHIFT)
        for _ in order[at + 1 :]:
            back.send_keys(Keys.TAB)
        back.key_up(Keys.SHIFT).perform()
        return [name for name, _ in order[: at + 1]]

    def screenshot(self, path: Path) -> Path:
        assert self.driver.save_screenshot(str(path))
        return path


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``; fails after `PATIENCE_S`."""
    limit = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < limit, f"never true: {what}"
        time.sleep(0.02)
    return value


__all__ = ["Browser", "Keys", "chromium", "until"]
