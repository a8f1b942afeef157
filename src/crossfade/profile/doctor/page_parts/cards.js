// The diagnoses: a list of them, and the open one.

/** The list of diagnoses, as tabs, and the card of the selected one. `onSelect` gets the index of the one that was chosen. */
class Cards {
  constructor(report, onSelect) {
    this.report = report;
    this.list = document.getElementById("list");
    this.card = document.getElementById("card");
    this.tabs = report.diagnoses.map((diagnosis, index) => this.tab(diagnosis, index, onSelect));
    const firstRemark = report.diagnoses.findIndex((diagnosis) => diagnosis.is_remark);
    this.tabs.forEach((tab, index) => {
      if (index === firstRemark) this.list.append(element("p", { role: "presentation" }, "Remarks: little or unsure"));
      this.list.append(tab);
    });
    document.getElementById("diagnoses").hidden = !this.tabs.length;
    this.list.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      event.stopPropagation();
      const next = (this.tabs.indexOf(document.activeElement) + by + this.tabs.length) % this.tabs.length;
      onSelect(next);
      this.tabs[next].focus();
    });
  }

  tab(diagnosis, index, onSelect) {
    const tab = element(
      "button",
      { type: "button", role: "tab", id: `tab-${index}`, "aria-controls": "card", class: diagnosis.is_remark ? "remark" : "" },
      element("span", { class: "number", "aria-hidden": "true" }, `${index + 1}`),
      element("span", { class: "what" }, sentence(diagnosis.title)),
      element("span", { class: "gain" }, diagnosis.gain),
    );
    tab.addEventListener("click", () => onSelect(index));
    return tab;
  }

  /** Opens a diagnosis's card. */
  open(index) {
    const diagnosis = this.report.diagnoses[index];
    this.tabs.forEach((tab, at) => {
      tab.setAttribute("aria-selected", String(at === index));
      tab.tabIndex = at === index ? 0 : -1;
    });
    this.card.setAttribute("aria-labelledby", `tab-${index}`);
    this.card.replaceChildren(
      element("h2", {}, sentence(diagnosis.title)),
      this.wins(diagnosis),
      element("div", { class: "columns" }, this.found(diagnosis), this.mended(diagnosis)),
    );
  }

  wins(diagnosis) {
    const line = element("p", { class: "wins" }, element("strong", {}, `The fix wins ${diagnosis.gain}.`));
    if (diagnosis.fixed) {
      const [nowUs, fixedUs] = [this.report.now.end_us, diagnosis.fixed.end_us];
      line.append(` This trace, the profiler's time included: ${lengthWords(nowUs)}, and ${lengthWords(fixedUs)} with it.`);
    } else {
      line.append(" No timeline after the fix is drawn for this one.");
    }
    if (diagnosis.confidence) line.append(` Confidence: ${diagnosis.confidence}.`);
    return line;
  }

  found(diagnosis) {
    const terms = element("dl");
    for (const [term, text] of [["Seen", diagnosis.evidence], ["Where", diagnosis.where]]) {
      if (text) terms.append(element("dt", {}, term), element("dd", { class: term.toLowerCase() }, term === "Where" ? text : sentence(text)));
    }
    return terms;
  }

  mended(diagnosis) {
    const terms = element("dl", {}, element("dt", {}, "Fix"), element("dd", {}, sentence(diagnosis.fix)));
    if (diagnosis.code) {
      terms.append(element("dd", {}, element("pre", { tabindex: "0", "aria-label": "the fix as code" }, diagnosis.code)));
    }
    return terms;
  }
}

/** The table of metrics; the rows beyond the first few are folded. */
function showMetrics(metrics, place) {
  const SHOWN = 7;
  const table = (rows) =>
    element(
      "table",
      {},
      ...rows.map(([label, value]) => element("tr", {}, element("th", { scope: "row" }, label), element("td", {}, value))),
    );
  place.append(table(metrics.slice(0, SHOWN)));
  const more = metrics.slice(SHOWN);
  if (more.length) place.append(element("details", {}, element("summary", {}, `${more.length} more`), table(more)));
}

/** The legend: the kinds that the timelines have. */
function showLegend(kinds, place) {
  KINDS.forEach((kind, number) => {
    if (kinds.has(number)) place.append(element("li", {}, element("i", { class: kind.key }), kind.words));
  });
  place.append(element("li", {}, element("i", { class: "mark" }), "marked by the diagnosis"));
}

/** The notes, if there are any. */
function showNotes(notes, place) {
  place.hidden = !notes.length;
  place.querySelector("ul").append(...notes.map((note) => element("li", {}, note)));
}
