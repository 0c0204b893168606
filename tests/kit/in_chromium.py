"""Runs scripts on pages in Chromium, in the width of a phone or of a screen."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runtimes.browsing import BROWSERS

BROWSER = next((b for b in (os.environ.get("CHROMIUM", ""), *BROWSERS) if b and Path(b).exists()), "")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip
in_a_browser = pytest.mark.skipif(not BROWSER, reason="Chromium is not installed: apt-get install chromium")
WIDTHS = (360, 1400)  # pixels: a phone, and a screen


def chromium(page: Path, *options: str, fragment: str = "") -> str:
    """Open a page in Chromium and return its output."""
    profile = page.parent / "profile"
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *options, f"{page.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout


def in_a_frame(page: Path, width: int, script: str) -> Any:
    """Run a script on a page in a frame of this width, as a window has at least 500 pixels, and return its result.

    In the script, ``d`` is the page's document.
    """
    framed = page.with_name("framed.html")
    framed.write_text(
        f"""<iframe id="f" src="{page.name}" width="{width}" height="900"></iframe><script>
        const frame = document.getElementById("f"), found = (d) => {{{script}}};
        frame.onload = () => {{ document.title = JSON.stringify(found(frame.contentDocument)); }};</script>""",
        "utf-8",
    )
    dom = chromium(framed, "--dump-dom", "--allow-file-access-from-files")
    title = re.search("<title>(.*?)</title>", dom, re.DOTALL)
    assert title
    return json.loads(html.unescape(title[1]))
