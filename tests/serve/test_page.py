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

BACKGROUNDS = {"light": "rgb(251, 251, 253)", "dark": "rgb(19, 20, 24)"}
LONG = ', "ignore_eos": true, "max_tokens": 4000}'
# The least contrast of text on the page, as WCAG 2.1 defines it.
CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => numbers(color).slice(0, 3)
    .map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return numbers(color)[3] === 0 ? behind(element.parentElement) : color;
  };
  const shown = [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
    && !one.matches(":disabled") && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return Math.min(...shown.map((one) => {
    const [low, high] = [getComputedStyle(one).color, behind(one)].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  }));
}"""
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
        quiet = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
        one = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--no-first-run", *quiet])
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


@pytest.fixture
def bodies(page):
    """What the page asks from here on, each answer made long."""
    asked = []

    def lengthen(route):
        asked.append(json.loads(route.request.post_data))
        route.continue_(post_data=route.request.post_data[:-1] + LONG)

    page.route("**/v1/chat/completions", lengthen)
    return asked


def test_a_person_sees_an_answer_grow_and_stops_it(page, bodies, server):
    page.fill("#text", "Count.")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant details")
    assert page.is_disabled("#send") and page.is_enabled("#stop")
    length = len(page.text_content("li.assistant"))
    page.wait_for_function("n => document.querySelector('li.assistant').textContent.length > n", arg=length)
    assert page.query_selector("li.assistant .note") is None, "it goes on"
    page.click("#stop")
    page.wait_for_selector("li.assistant .note")
    assert "stopped" in page.inner_text("li.assistant .note") and page.is_enabled("#send")
    wait_until(server.is_idle)


def test_a_new_conversation_has_nothing_of_the_last_one(page, bodies, server):
    page.fill("#text", "Count.")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant details")
    page.click("#clear")
    page.wait_for_selector("#send:enabled")
    page.fill("#text", "Again.")
    page.press("#text", "Enter")
    page.wait_for_selector("li.assistant details")
    page.keyboard.press("Escape")
    page.wait_for_selector("li.assistant .note")
    assert bodies[-1]["messages"] == [{"role": "user", "content": "Again."}]
    wait_until(server.is_idle)


def test_the_keyboard_is_enough(page):
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("What is 12 + 30?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    page.wait_for_selector("li.assistant .note")
    page.wait_for_function("() => document.activeElement.id === 'text'")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.is_visible("li.assistant details div"), "the thinking is unfolded"
    names = []
    while "Temperature" not in names and len(names) < 20:
        page.keyboard.press("Tab")
        names.append(page.evaluate("(document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()"))
        if names[-1] == "Parameters":
            page.keyboard.press("Enter")
    assert names == ["Message", "Send", "Image", "Live", "Parameters", "Think first", *names[6:7], "Temperature"]
    assert names[6].startswith("Effort")


def test_the_curves_move_while_tokens_come(page, bodies):
    page.wait_for_function("() => document.querySelector('#gauges dd').textContent === '0'")  # they have begun
    page.fill("#text", "Tell me about the sea.")
    page.press("#text", "Enter")
    gauges = {}

    def move():
        for row in page.query_selector_all("#gauges > div"):
            name, number = (row.query_selector(tag).inner_text() for tag in ("dt", "dd"))
            gauges.setdefault(name, set()).add(number)
            points = (row.query_selector("polyline").get_attribute("points") or "").split()
            gauges[name] |= {"moves"} if len({point.split(",")[1] for point in points}) > 1 else set()
        still = [name for name in ("Tokens/s", "Running", "Cache in use") if "moves" not in gauges[name]]
        silent = [name for name in ("Time to first token", "Between tokens") if gauges[name] == {"–"}]
        return not still and not silent or page.wait_for_timeout(200)

    wait_until(move)
    assert [*gauges] == [
        "Tokens/s", "Running", "Waiting", "Cache in use", "Time to first token", "Between tokens", "Cache hits",
        "Accepted length",
    ]  # fmt: skip
    assert "1" in gauges["Running"]
    page.keyboard.press("Escape")
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
    assert page.input_value("#text") == "12 o'clock", "to be sent once it is mended"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_readable_on_a_phone_and_in_the_dark(browser, server, width, scheme):
    one = browser.new_page(viewport={"width": width, "height": 740}, color_scheme=scheme)
    one.set_default_timeout(PATIENCE)
    one.goto(server.url)
    one.fill("#text", "What is 12 + 30?")
    one.press("#text", "Enter")
    one.wait_for_selector("li.assistant .note")
    one.click("li.assistant summary")
    one.locator("aside summary", has_text="Parameters").click()
    one.fill("#top_p", "7")
    one.fill("#text", "And " + 40 * "long" + "?")
    one.press("#text", "Enter")
    one.wait_for_selector("li.error")
    assert one.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for name in ("#send", "#text", "#clear", "#messages", "aside"):
        box = one.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 740
    assert one.locator("#messages").bounding_box()["height"] >= 200
    assert one.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[scheme]
    assert one.evaluate(CONTRAST) >= 4.5
    if folder := os.environ.get("SCREENSHOTS"):
        one.wait_for_timeout(1500)
        one.screenshot(path=Path(folder) / f"{scheme}-{width}.png")
    one.close()


@pytest.fixture
def digit(tmp_path):
    """A file with the picture of a digit."""
    record = next(line for line in EVAL.read_text().splitlines() if '"image_digit"' in line)
    content = json.loads(record)["request"]["messages"][0]["content"]
    url = next(part["image_url"]["url"] for part in content if part["type"] == "image_url")
    file = tmp_path / "digit.png"
    file.write_bytes(base64.b64decode(url.partition(",")[2]))
    return file


def test_an_image_is_dropped_on_the_form(page, digit):
    data = page.evaluate_handle(
        """(text) => {
          const data = new DataTransfer();
          const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          data.items.add(new File([bytes], "digit.png", { type: "image/png" }));
          return data;
        }""",
        base64.b64encode(digit.read_bytes()).decode(),
    )
    page.dispatch_event("#text", "dragover", {"dataTransfer": data})
    assert page.get_attribute("#ask", "class") == "over"
    page.dispatch_event("#text", "drop", {"dataTransfer": data})
    page.wait_for_selector("#images button")
    assert page.inner_text("#images") == "digit.png ×" and page.get_attribute("#ask", "class") == ""
    page.locator("summary", has_text="Tools").click()
    page.fill("#tools", "[")
    page.fill("#text", "Which digit is this?")
    page.press("#text", "Enter")
    page.wait_for_selector("li.error")
    assert page.inner_text("#images") == "digit.png ×", "what is not sent is not lost"


def test_an_image_goes_with_the_next_message_and_can_be_taken_back(page, digit):
    page.set_input_files("#files", [str(digit), str(digit)])
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
