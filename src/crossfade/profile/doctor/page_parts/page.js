// The page: what the report says is put in its places, keys are listened to, and tests can look at the state.

const report = JSON.parse(document.getElementById("report").textContent);
const stage = new Stage(report);
let selected = -1;

/** Tells readers who cannot see the canvas. */
function say(text) {
  document.getElementById("said").textContent = text;
}

/** Opens a diagnosis, and marks it on the timeline. */
function select(index) {
  selected = index;
  cards.open(index);
  stage.select(report.diagnoses[index]);
  showPressed();
  say(`Diagnosis ${index + 1} of ${report.diagnoses.length}: ${report.diagnoses[index].title}`);
}

function selectAndGo(index) {
  if (!report.diagnoses[index]) return;
  select(index);
  stage.goToMarks();
}

function showPressed() {
  const button = document.querySelector("[data-key=f]");
  button.setAttribute("aria-pressed", String(stage.wantsFixed));
  button.disabled = !(report.diagnoses[selected] && report.diagnoses[selected].fixed);
}

function goToMark(by) {
  const mark = stage.goToMark(by);
  if (mark) say(`${mark[3]}: ${report.lanes[mark[0]]}, ${duration(mark[2] - mark[1])} from ${duration(mark[1])}`);
}

function moved(move) {
  move();
  const [startUs, endUs] = stage.view.goal;
  say(`from ${duration(startUs)} to ${duration(endUs)}`);
}

const DIGITS = Object.fromEntries([1, 2, 3, 4, 5, 6, 7, 8, 9].map((digit) => [digit, () => selectAndGo(digit - 1)]));

/** What keys do wherever the focus is; buttons of the page have the same keys. */
const KEYS = {
  ...DIGITS,
  n: () => selectAndGo((selected + 1) % report.diagnoses.length),
  p: () => selectAndGo((selected - 1 + report.diagnoses.length) % report.diagnoses.length),
  m: () => goToMark(1),
  M: () => goToMark(-1),
  f: () => {
    stage.showFixed(!stage.wantsFixed);
    showPressed();
  },
  "+": () => moved(() => stage.zoom(1 / 1.5)),
  "=": () => moved(() => stage.zoom(1 / 1.5)),
  "-": () => moved(() => stage.zoom(1.5)),
  Home: () => moved(() => stage.goWhole()),
  ArrowLeft: () => moved(() => stage.pan(-0.15)),
  ArrowRight: () => moved(() => stage.pan(0.15)),
  "?": () => document.getElementById("help").showModal(),
};

/** What keys do on the timeline itself. */
const TIMELINE_KEYS = {
  ArrowUp: () => say(stage.focusRow(-1)),
  ArrowDown: () => say(stage.focusRow(1)),
  "Shift+ArrowLeft": () => say(stage.focusSpan(-1)),
  "Shift+ArrowRight": () => say(stage.focusSpan(1)),
  Enter: () => stage.focus && stage.goToSpan(stage.focus),
  Escape: () => stage.forget(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const isArrow = event.key.startsWith("Arrow");
  if (isArrow && event.target.closest("pre")) return; // its own scrolling
  const name = isArrow && event.shiftKey ? `Shift+${event.key}` : event.key;
  const act = (event.target === stage.canvas && TIMELINE_KEYS[name]) || KEYS[name];
  if (!act) return;
  event.preventDefault();
  act();
});

for (const button of document.querySelectorAll("[data-key]")) button.addEventListener("click", () => KEYS[button.dataset.key]());
document.getElementById("title").textContent = report.title;
document.getElementById("summary").textContent = report.summary;
showMetrics(report.metrics, document.getElementById("metrics"));
showNotes(report.notes, document.getElementById("notes"));
showLegend(new Set(report.now.spans.map((span) => span[4])), document.getElementById("legend"));
const cards = new Cards(report, selectAndGo);
if (report.diagnoses.length) select(0);
else {
  stage.layOut();
  showPressed();
}
stage.canvas.setAttribute(
  "aria-label",
  `Timeline of ${report.lanes.length} lanes, ${lengthWords(report.now.end_us)}. Arrow keys up and down choose a lane, ` +
    "Shift with left and right its spans.",
);
say("");
listenToPointer(stage);
addEventListener("scroll", () => stage.ask(), { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  stage.painter.readColours();
  stage.ask();
});

/** The page's state, for tests to read. Frame times are in milliseconds, of drawing alone. */
window.doctorPage = Object.freeze({
  get selected() {
    return selected;
  },
  get visible() {
    return [stage.view.startUs, stage.view.endUs];
  },
  get goal() {
    return stage.view.goal;
  },
  get isMoving() {
    return stage.view.isMoving || stage.isAsked;
  },
  get marks() {
    return stage.drawnMarks.map((mark) => ({ ...mark }));
  },
  get focus() {
    return stage.focus && { lane: stage.focus.row.lane, panel: stage.focus.row.panel, span: stage.focus.span };
  },
  get numTimelines() {
    return stage.timelines.length;
  },
  get numSpans() {
    return stage.timelines.reduce((sum, timeline) => sum + timeline.numSpans, 0);
  },
  get frames() {
    return [...stage.frames];
  },
  /** Where a time is on the page: [x, y] in pixels, in the middle of a lane of a panel. */
  place(panel, lane, us) {
    const { left, top } = stage.canvas.getBoundingClientRect();
    const row = stage.painter.rows.rows.find((each) => each.panel === panel && each.lane === lane);
    return [left + stage.painter.x(us), top + row.top + row.height / 2];
  },
});
