"use strict";
// The table of samples: search, filter, pages. Without it the rest of the report stands.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const [search, filter, body] = ["search", "filter", "rows"].map(element);
  const PAGE = 20;
  const SIGNS = { 0: "\u2717", 1: "\u2713" };
  const KINDS = { 0: "bad", 1: "good" };
  let found = data.rows;
  let page = 0;

  const differs = (row) => row.marks.some((mark, i) => row.reference[i] !== null && row.reference[i] !== mark);
  const filters = {
    all: () => true,
    differs,
    ...Object.fromEntries(
      data.metrics.flatMap((_, i) => [
        [`right${i}`, (row) => row.marks[i] === 1],
        [`wrong${i}`, (row) => row.marks[i] === 0],
      ]),
    ),
  };

  const cell = (row, kind, text) => {
    const td = document.createElement("td");
    td.className = kind;
    td.textContent = text;
    row.append(td);
    return td;
  };

  const highlight = (text, words) => {
    const span = document.createElement("span");
    const at = words ? text.toLowerCase().indexOf(words) : -1;
    if (at < 0) {
      span.textContent = text;
      return span;
    }
    const mark = document.createElement("mark");
    mark.textContent = text.slice(at, at + words.length);
    span.append(text.slice(0, at), mark, text.slice(at + words.length));
    return span;
  };

  const toggle = (row) => row.setAttribute("aria-expanded", String(row.classList.toggle("open")));

  const tableRow = (row, words) => {
    const tr = document.createElement("tr");
    tr.tabIndex = 0;
    tr.setAttribute("aria-expanded", "false");
    if (differs(row)) {
      tr.classList.add("differs");
      tr.title = "differs from the reference";
    }
    cell(tr, "number soft", row.index);
    cell(tr, "passage", "").append(highlight(row.text, words));
    cell(tr, "answer", row.target);
    cell(tr, "answer soft", row.answer);
    for (const mark of row.marks) {
      cell(tr, `mark ${KINDS[mark] ?? "soft"}`, SIGNS[mark] ?? mark ?? "");
    }
    cell(tr, "number soft time", row.ms);
    tr.addEventListener("click", () => String(getSelection()) || toggle(tr));
    tr.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        toggle(tr);
      }
    });
    return tr;
  };

  const show = () => {
    const words = search.value.trim().toLowerCase();
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(page, pages - 1);
    const shown = found.slice(page * PAGE, (page + 1) * PAGE);
    body.replaceChildren(...shown.map((row) => tableRow(row, words)));
    element("count").textContent =
      `${found.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} samples`;
    element("page").textContent = `page ${page + 1} of ${pages}`;
    element("previous").disabled = page === 0;
    element("next").disabled = page === pages - 1;
  };

  const select = () => {
    const words = search.value.trim().toLowerCase();
    const keep = filters[filter.value];
    found = data.rows.filter(
      (row) =>
        keep(row) &&
        (!words || `${row.index} ${row.text} ${row.target} ${row.answer}`.toLowerCase().includes(words)),
    );
    page = 0;
    show();
  };

  const turn = (by) => () => {
    page += by;
    show();
  };
  search.addEventListener("input", select);
  filter.addEventListener("change", select);
  element("previous").addEventListener("click", turn(-1));
  element("next").addEventListener("click", turn(1));
  select();
})();
