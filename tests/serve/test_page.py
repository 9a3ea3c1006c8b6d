"""The page at `/` in headless Chromium. Skipped where playwright or a Chromium is not installed; see docs/server.md."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import deepinfer
from serve_client import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EVAL = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"
PATIENCE = 120_000  # milliseconds


def test_the_files_of_the_page_are_sent_with_a_policy(server):
    page = server.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text):
        assert server.http.get("/" + name).status_code == 200
    assert server.http.get("/page/..%2Fapp.py").status_code == 404
    assert server.http.get("/page/app.py").status_code == 404


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as tool:
        one = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser, server):
    problems = []
    one = browser.new_page()
    one.set_default_timeout(PATIENCE)
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    one.goto(server.url)
    yield one
    one.close()
    assert problems == []


def test_a_person_sends_reads_and_goes_on(page):
    page.fill("#text", "What is 12 + 30?")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant .note")
    assert page.inner_text("li.assistant .content") == "42"
    assert not page.is_visible("li.assistant details div"), "the thinking is folded"
    page.click("li.assistant summary")
    assert page.inner_text("li.assistant details div") != ""
    page.fill("#text", "And 1 + 1?")
    page.click("#send")
    page.wait_for_selector("li.assistant:nth-child(4) .note")
    if folder := os.environ.get("SCREENSHOTS"):
        page.wait_for_timeout(2500)
        page.screenshot(path=Path(folder) / "page.png")


def test_a_person_stops_an_answer(page, server):
    page.route("**/v1/chat/completions", lambda route: route.continue_(
        post_data=route.request.post_data[:-1] + ', "ignore_eos": true, "max_tokens": 4000}'))  # fmt: skip
    page.fill("#text", "Count.")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant details")
    page.keyboard.press("Escape")
    page.wait_for_selector("li.assistant .note")
    assert "stopped" in page.inner_text("li.assistant .note") and page.is_enabled("#send")
    wait_until(server.is_idle)


def test_the_curves_move_while_tokens_come(page):
    tokens = "#gauges > div:first-child"
    page.fill("#text", "Tell me about the sea.")
    page.press("#text", "Enter")
    wait_until(lambda: page.inner_text(f"{tokens} dd") not in ("–", "0") or page.wait_for_timeout(100))
    assert page.get_attribute(f"{tokens} polyline", "points").count(",") >= 1
    page.wait_for_selector("li.assistant .note")


def test_a_tool_is_called_and_a_schema_followed(page):
    page.locator("summary", has_text="Tools").click()
    page.fill("#tools", '[{"type": "function", "function": {"name": "now", "description": "The time."}}]')
    page.select_option("#tool_choice", "required")
    page.fill("#text", "What time is it?")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant .note")
    assert page.inner_text("li.assistant pre").startswith("now({")
    page.fill("#tools", "")
    page.locator("summary", has_text="JSON schema").click()
    page.fill("#schema", '{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}')
    page.fill("#text", "What is 12 + 30? Answer in JSON.")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant:nth-child(4) .note")
    assert isinstance(json.loads(page.inner_text("li.assistant:nth-child(4) .content"))["sum"], int)
    page.fill("#tools", "[")
    page.fill("#text", "12 o'clock")
    page.press("#text", "Enter")
    assert "Tools is no JSON" in page.inner_text("li.error")


def test_the_page_fits_a_phone_and_darkness(browser, server):
    one = browser.new_page(viewport={"width": 390, "height": 780}, color_scheme="dark")
    one.goto(server.url)
    assert one.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert one.is_visible("#send") and one.is_visible("#text")
    assert one.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 24)"
    if folder := os.environ.get("SCREENSHOTS"):
        one.wait_for_timeout(1500)
        one.screenshot(path=Path(folder) / "phone.png")
    one.close()


def test_an_image_goes_with_the_next_message_and_can_be_taken_back(page, server, tmp_path):
    record = next(line for line in EVAL.read_text().splitlines() if '"image_digit"' in line)
    content = json.loads(record)["request"]["messages"][0]["content"]
    url = next(part["image_url"]["url"] for part in content if part["type"] == "image_url")
    file = tmp_path / "digit.png"
    file.write_bytes(base64.b64decode(url.partition(",")[2]))
    page.set_input_files("#files", [str(file), str(file)])
    page.wait_for_selector("#images button:nth-child(2)")
    page.click("#images button:nth-child(2)")
    assert page.inner_text("#images") == "digit.png ×"
    page.evaluate("document.getElementById('thinking').checked = false")  # it lies in a fold
    page.fill("#text", "Which digit is this?")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant .note")
    assert page.inner_text("li.user") == "Which digit is this?\ndigit.png" and page.inner_text("#images") == ""
    assert page.inner_text("li.assistant .content") in set("0123456789")


def test_a_file_that_is_no_image_is_refused_on_the_page(page, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    page.set_input_files("#files", str(file))
    page.wait_for_selector("li.error")
    assert page.inner_text("li.error") == "notes.txt is no PNG, JPEG, WebP or GIF"
