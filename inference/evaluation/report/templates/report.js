"use strict";
// Renders the page's Markdown (document.py), with charts of the record under the headings, and the table of samples.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const SVG = new Set(["svg", "line", "rect", "circle", "text", "title", "polyline"]);

  const make = (tag, attributes = {}, ...children) => {
    const element = SVG.has(tag)
      ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };

  // Numbers in the format of document.py; null stands for numbers that JSON cannot hold.

  const numberText = (value) => {
    if (value === null) return "not a number";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e9 || size < 1e-3) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };
  const timeText = (ms) => {
    if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
    return `${ms < 100 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  };
  const valueText = (value, unit) => {
    return unit === "fraction" && value !== null ? `${(100 * value).toFixed(2)}%` : numberText(value);
  };

  // Axes: positions are in percent of the plotting area, so that a chart fills the available width.

  const roundTicks = (low, high, count) => {
    const span = high - low || 1;
    const raw = span / count;
    const magnitude = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * magnitude).find((each) => each >= raw * (1 - 1e-9));
    const first = Math.floor(low / step + 1e-9);
    const last = Math.ceil(high / step - 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  };
  const logTicks = (low, high) => {
    const steps = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      steps.push(...[1, 2, 5].map((each) => each * 10 ** power));
    }
    const first = steps.findLastIndex((each) => each <= low * (1 + 1e-9));
    const last = steps.findIndex((each) => each >= high * (1 - 1e-9));
    return steps.slice(first, Math.max(last, first + 1) + 1);
  };
  const axis = (ticks, { isLog = false, isUp = false } = {}) => {
    const scale = isLog ? Math.log : (value) => value;
    const [low, high] = [scale(ticks[0]), scale(ticks.at(-1))];
    return (value) => {
      const share = (scale(value) - low) / (high - low);
      return Number((100 * (isUp ? 1 - share : share)).toFixed(2));
    };
  };
  const tickText = (ticks, unit) => {
    if (unit !== "fraction") return numberText;
    const step = 100 * (ticks[1] - ticks[0]);
    return (tick) => `${(100 * tick).toFixed(step >= 1 - 1e-9 ? 0 : step >= 0.1 - 1e-9 ? 1 : 2)}%`;
  };
  const hint = (element, text) => {
    element.append(make("title", {}, text));
    return element;
  };
  const legend = (entries) =>
    make("ul", { class: "key" }, ...entries.map(([kind, text]) => make("li", {}, make("i", { class: kind }), text)));
  const note = (text, attributes) => make("text", { class: "note", ...attributes }, text);

  // Horizontal chart: each of `rows` has a name, `points` (value, low, high, series or mark) and `bars` (from, to).

  const rowsChart = ({ rows, unit = "", keys = [], from = null }) => {
    const ends = rows.flatMap((row) => [
      ...(row.points ?? []).flatMap((each) => [each.value, each.low ?? each.value, each.high ?? each.value]),
      ...(row.bars ?? []).flatMap((each) => [each.from, each.to]),
    ]);
    const ticks = roundTicks(from ?? Math.min(...ends), Math.max(...ends, (from ?? 0) + 1e-9), 5);
    const x = axis(ticks);
    const text = tickText(ticks, unit);
    const chart = make("div", { class: "rows" });
    for (const row of rows) {
      const points = (row.points ?? []).filter((each) => !each.mark);
      const height = 34 + 22 * Math.max(0, points.length - 1);
      const svg = make("svg", { height });
      for (const tick of ticks) {
        svg.append(make("line", { class: tick ? "grid" : "base", x1: `${x(tick)}%`, x2: `${x(tick)}%`, y2: "100%" }));
      }
      points.forEach((each, i) => {
        const y = 17 + 22 * i;
        const kind = `s${(each.series ?? 0) % 8}`;
        const [low, high] = [x(each.low ?? each.value), x(each.high ?? each.value)];
        svg.append(
          make("line", { class: `whisker ${kind}`, x1: `${low}%`, x2: `${high}%`, y1: y, y2: y }),
          hint(make("circle", { class: `point ${kind}`, cx: `${x(each.value)}%`, cy: y, r: 6 }), each.hint),
          note(each.text ?? valueText(each.value, unit), { x: `${high}%`, dx: 9, y: y + 4 }),
        );
      });
      for (const each of (row.points ?? []).filter((one) => one.mark)) {
        const inner = make("svg", { x: `${x(each.value)}%`, y: 17 });
        inner.append(hint(make("rect", { class: each.mark }), each.hint));
        svg.append(inner);
      }
      (row.bars ?? []).forEach((each, i) => {
        const [left, right] = [x(each.from), x(each.to)];
        const place = { x: `${left}%`, y: 6, width: `${Math.max(right - left, 0.2)}%`, height: 22, rx: 3 };
        svg.append(
          hint(make("rect", { class: `bar s${(each.series ?? i) % 8}`, ...place }), each.text),
          note(each.text, { x: `${right}%`, dx: 7, y: 22 }),
        );
      });
      chart.append(make("b", {}, row.name), svg);
    }
    const labels = make("svg", { height: 24 });
    for (const tick of ticks) labels.append(make("text", { class: "middle", x: `${x(tick)}%`, y: 16 }, text(tick)));
    chart.append(make("b"), labels);
    return [chart, ...(keys.length ? [legend(keys)] : [])];
  };

  // Vertical chart: `points` at x, as bars or marks with a line up to `high`; `line` joins them, `names` label the x axis.

  const columnsChart = (data) => {
    const { points, names, unit = "", xName = "", yName = "", series = [], line = "" } = data;
    const isBar = data.bars === true;
    const values = points.flatMap((each) => [each.value, each.high ?? each.value, each.low ?? each.value]);
    const [lowest, highest] = [Math.min(...values), Math.max(...values)];
    const isLog = data.mayBeLog === true && lowest > 0 && highest / lowest > 15;
    const from = line === "curve" ? Math.max(0, lowest - (highest - lowest) / 10) : 0;
    const yTicks = isLog ? logTicks(lowest, highest) : roundTicks(from, highest || 1, 4);
    const y = axis(yTicks, { isLog, isUp: true });
    const text = tickText(yTicks, unit);
    const x = axis([-0.5, names.length - 0.5]);
    const svg = make("svg", { height: 200 });
    for (const tick of yTicks) {
      svg.append(
        make("line", { class: tick === 0 ? "base" : "grid", x2: "100%", y1: `${y(tick)}%`, y2: `${y(tick)}%` }),
        make("text", { class: "end", y: `${y(tick)}%`, dx: -8, dy: 4 }, text(tick)),
      );
    }
    names.forEach((words, i) => {
      if (words) svg.append(make("text", { class: "middle", x: `${x(i)}%`, y: "100%", dy: 18 }, words));
    });
    if (line) {
      const places = points.map((each) => `${x(each.x)},${y(each.value)}`).join(" ");
      const inner = make("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" });
      inner.append(make("polyline", { class: "curve s0", points: places }));
      svg.append(inner);
    }
    for (const each of points) {
      const kind = `s${(each.series ?? 0) % 8}`;
      const [at, top] = [x(each.x), y(each.value)];
      const words = each.hint ?? valueText(each.value, unit);
      if (isBar) {
        const [left, end] = [x(each.from), x(each.to)];
        const place = { x: `${left}%`, y: `${top}%`, width: `${Math.max(end - left - 0.2, 0.3)}%`, height: `${100 - top}%` };
        svg.append(hint(make("rect", { class: `bar ${kind}`, ...place }), words));
        if (each.label && end - left > 7) {
          svg.append(note(each.label, { class: "note middle", x: `${(left + end) / 2}%`, y: `${top}%`, dy: -5 }));
        }
        continue;
      }
      if (each.high !== undefined) {
        const [low, high] = [y(each.low ?? each.value), y(each.high)];
        svg.append(make("line", { class: `whisker ${kind}`, x1: `${at}%`, x2: `${at}%`, y1: `${low}%`, y2: `${high}%` }));
      }
      svg.append(hint(make("circle", { class: `point ${kind}`, cx: `${at}%`, cy: `${top}%`, r: 5 }), words));
    }
    const entries = series.map((name, i) => [`s${i % 8}`, name]);
    return [
      make("div", { class: "axis" }, isLog ? `${yName}, log scale` : yName),
      ...(entries.length > 1 ? [legend(entries)] : []),
      svg,
      make("div", { class: "axis" }, xName),
    ];
  };

  // Kinds of charts, each for one part of the record (record.py).

  const title = (name) => {
    const words = name.split("_");
    const text = (words.length > 1 ? words.slice(1) : words).join(" ");
    return text.charAt(0).toUpperCase() + text.slice(1).toLowerCase();
  };
  const intervalText = ({ low, high, unit }) => `${valueText(low, unit)} to ${valueText(high, unit)}`;
  const intervalPoint = (metric, series = 0) => {
    const { value, unit } = metric;
    const [low, high] = [metric.low ?? value, metric.high ?? value];
    const text = valueText(value, unit);
    return { value, low, high, series, text, hint: `${text} (95%: ${intervalText(metric)})` };
  };
  const shapeText = (point) => (point.output_len ? `${point.input_len} + ${point.output_len}` : `${point.input_len}`);
  const loadText = ({ batch_size: rows, concurrency }) => `${rows > 1 ? `batch ${rows}, ` : ""}${concurrency} in flight`;
  const card = (name, ...parts) => make("div", { class: "card" }, make("h3", {}, name), ...parts);
  const figure = (name, parts) => card(name, make("figure", { role: "img", "aria-label": name }, ...parts));
  const pair = (cards) => make("div", { class: "pair" }, ...cards);

  const cards = (tasks) =>
    make(
      "div",
      { class: "cards" },
      ...tasks.flatMap((task) =>
        task.metrics.map((metric) =>
          make(
            "div",
            { class: "card", title: metric.method },
            make("div", { class: "title" }, `${task.name} \u00b7 ${title(metric.name).toLowerCase()}`),
            make("div", { class: "big" }, valueText(metric.value, metric.unit)),
            make("div", { class: "small" }, `95%: ${intervalText(metric)}`),
          ),
        ),
      ),
    );

  const accuracies = (task, { baseline, bounds, baseline_source: source }) => {
    const metrics = task.metrics.filter((each) => each.unit === "fraction" && each.value !== null);
    const others = [
      ["baseline", `baseline: ${source}`, (metric) => baseline[metric.name]?.value],
      ["bound", "lower bound of the gate", (metric) => bounds[metric.name]?.min],
    ];
    const keys = [["k-value", "measured, with 95% interval"]];
    const rows = metrics.map((metric) => ({ name: title(metric.name), points: [intervalPoint(metric)] }));
    for (const [mark, words, valueOf] of others) {
      const values = metrics.map((metric) => valueOf(metric) ?? null);
      values.forEach((value, i) => {
        if (value !== null) rows[i].points.push({ value, mark, hint: `${mark} ${valueText(value, "fraction")}` });
      });
      if (values.some((value) => value !== null)) keys.push([`k-${mark}`, words]);
    }
    return rows.length ? figure("Accuracies with 95% intervals", rowsChart({ rows, unit: "fraction", from: 0, keys })) : "";
  };

  // Title, axis, and a point's value with the higher value at which its line ends.
  const SWEEP = [
    ["Latency of a request", "latency p50 (to p95), ms", (point) => [point.latency.p50_ms, point.latency.p95_ms]],
    ["Throughput", "tokens per second", (point) => [point.tokens_per_s]],
    ["Time to the first token", "first token p50 (to p95), ms", (point) => [point.first_token_ms, point.first_token_p95_ms]],
    ["Each further token", "each further token, ms", (point) => [point.per_token_ms]],
  ];
  const sweep = (all) => {
    const [shapes, loads] = [shapeText, loadText].map((text) => [...new Set(all.map(text))]);
    const width = Math.min(0.7 / loads.length, 0.12 * shapes.length); // share of a shape's slot
    const xName = all.some((each) => each.output_len) ? "tokens in + out" : "tokens in";
    const charts = SWEEP.map(([name, yName, valuesOf]) => {
      const bars = name === "Throughput";
      const points = all.flatMap((point) => {
        const [value, high] = valuesOf(point);
        if (value === null) return [];
        const series = loads.indexOf(loadText(point));
        const x = shapes.indexOf(shapeText(point)) + (series - (loads.length - 1) / 2) * width;
        const text = bars ? `${numberText(value)} tokens/s` : timeText(value);
        const place = { x, from: x - 0.45 * width, to: x + 0.45 * width, series, value };
        const hint = `${shapeText(point)} tokens, ${loadText(point)}: ${text}`;
        return [{ ...place, hint, label: bars ? numberText(value) : "", ...(high === undefined || high === null ? {} : { high }) }];
      });
      return points.length ? figure(name, columnsChart({ points, bars, mayBeLog: !bars, names: shapes, series: loads, xName, yName })) : "";
    });
    return pair(charts.filter(Boolean));
  };

  const history = (runs) =>
    pair(
      Object.keys(runs.at(-1).metrics).flatMap((name) => {
        const known = runs.filter((each) => (each.metrics[name]?.value ?? null) !== null);
        if (!known.length) return [];
        const points = known.map((run, x) => {
          const point = intervalPoint(run.metrics[name]);
          return { ...point, x, hint: `${point.hint}, step ${run.step}` };
        });
        const names = known.map((run, i) => (i && i < known.length - 1 ? "" : `step ${run.step}`));
        return figure(title(name), columnsChart({ points, line: "curve", unit: known[0].metrics[name].unit, names }));
      }),
    );

  const stages = (all) => {
    let end = 0;
    const rows = all.map(({ name, seconds }, series) => {
      const from = end;
      end += seconds;
      return { name, bars: [{ from, to: end, text: `${numberText(seconds)} s`, series }] };
    });
    return figure("Seconds per stage", rowsChart({ rows, from: 0 }));
  };

  // Several runs: their metrics, and their latencies with a line up to the 95th percentile.
  const metricsOf = (report) => report.tasks.flatMap((task) => task.metrics);
  const place = (point) => `${shapeText(point)}, ${loadText(point)}`;
  const series = (all) => all.map(([name], i) => [`s${i % 8}`, name]);
  const metricsOfRuns = (all) => {
    const rows = metricsOf(all[0][1])
      .filter((metric) => metric.unit === "fraction")
      .map(({ name }) => ({
        name: title(name),
        points: all.flatMap(([, report], i) => {
          const found = metricsOf(report).find((metric) => metric.name === name);
          return (found?.value ?? null) === null ? [] : [intervalPoint(found, i)];
        }),
      }))
      .filter((row) => row.points.length > 1);
    return rows.length ? figure("Accuracies, with 95% intervals", rowsChart({ rows, unit: "fraction", keys: series(all) })) : "";
  };
  const speeds = (all) => {
    const rows = all[0][1].latency
      .map((first) => ({
        name: place(first),
        points: all.flatMap(([name, report], i) => {
          const found = report.latency.find((point) => place(point) === place(first));
          if (!found) return [];
          const { p50_ms: value, p95_ms: high } = found.latency;
          const text = timeText(value);
          return [{ value, high, text, hint: `${name}: p50 ${text}, p95 ${timeText(high)}`, series: i }];
        }),
      }))
      .filter((row) => row.points.length > 1);
    return rows.length ? figure("Latency, ms", rowsChart({ rows, from: 0, keys: series(all) })) : "";
  };

  // Heading -> its charts; those of "" come first.

  const chartsOf = ({ report, runs, checkpoints }) => {
    if (runs) return { Metrics: [metricsOfRuns(runs)], Latency: [speeds(runs)] };
    if (checkpoints) return { Checkpoints: checkpoints.length ? [history(checkpoints)] : [] };
    const found = {
      "": [cards(report.tasks)],
      "Latency and throughput": report.latency.length ? [sweep(report.latency)] : [],
      Stages: report.run.stages.length ? [stages(report.run.stages)] : [],
    };
    for (const task of report.tasks) {
      const heading = task.name.charAt(0).toUpperCase() + task.name.slice(1).toLowerCase();
      found[heading] = [accuracies(task, report)];
    }
    return found;
  };

  // Markdown, as far as document.py uses it: headings, paragraphs, tables and code; verdicts are coloured.

  const WORDS = [
    [/\b(breached|breaches|now wrong|worse|differs)\b/, "bad"],
    [/\b(insufficient|undecided)\b/, "open"],
    [/\b(held|holds|now right|better)\b/, "good"],
  ];
  const VERDICTS = new Set(["verdict", "changed", "against the best before it"]);
  const plain = (text) => text.replace(/\\(.)|&#64;/g, (_, escaped) => escaped ?? "@");
  const cellsOf = (line) => line.split(/(?<!\\)\|/).slice(1, -1).map((cell) => cell.trim());
  const contentOf = (cell, isVerdict) => {
    const link = /^\[(.*)\]\((.*)\)$/.exec(cell);
    if (link) return make("a", { href: plain(link[2]) }, plain(link[1]));
    const text = plain(cell);
    const colour = isVerdict ? WORDS.find(([pattern]) => pattern.test(text))?.[1] : undefined;
    return colour ? make("b", { class: colour }, text) : text;
  };
  const tableOf = (block) => {
    const [headCells, rule, ...rows] = block.split("\n").map(cellsOf);
    const head = headCells.map(plain);
    const kind = (column) => ({ "data-head": head[column], ...(rule[column].endsWith(":") ? { class: "number" } : {}) });
    const headRow = make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", ...kind(i) }, text)));
    const isVerdict = head.map((text) => VERDICTS.has(text));
    const stacked = isVerdict.includes(true) ? { class: "stacked" } : {}; // narrow screens stack the cells of a row
    const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", kind(i), contentOf(cell, isVerdict[i])))));
    return make("div", { class: "card scroll", tabindex: 0 }, make("table", stacked, make("thead", {}, headRow), make("tbody", {}, ...body)));
  };
  const codeOf = (block) => make("div", { class: "card" }, make("pre", {}, block.split("\n").slice(1, -1).join("\n")));

  const source = document.getElementById("markdown");
  const blocks = source.textContent.trim().split("\n\n").slice(1); // without the title
  const charts = chartsOf(page);
  source.remove(); // only after its replacement exists
  if (blocks[0]?.startsWith("|")) {
    for (const line of blocks.shift().split("\n").slice(2)) {
      const [name, value] = cellsOf(line).map(plain);
      document.getElementById("facts").append(make("li", {}, `${name} `, make("b", {}, value)));
    }
  }
  main.append(...(charts[""] ?? []));
  const sections = [];
  for (const block of blocks) {
    if (block.startsWith("## ")) sections.push({ heading: plain(block.slice(3)), text: [], tables: [] });
    else if (block.startsWith("|")) sections.at(-1).tables.push(tableOf(block));
    else sections.at(-1).text.push(block.startsWith("```") ? codeOf(block) : make("p", { class: "lead" }, plain(block)));
  }
  for (const { heading, text, tables } of sections) {
    main.append(make("h2", {}, heading), ...text, ...(charts[heading] ?? []), ...tables);
  }

  // Samples: search, filter, pages.

  const showSamples = (samples, report) => {
    // A mark for each quantity of a fraction, with the name of its first metric.
    const fractions = metricsOf(report).filter((metric) => metric.unit === "fraction");
    const metrics = [...new Set(fractions.map((metric) => metric.sample_value))];
    const titles = metrics.map((name) => title(fractions.find((metric) => metric.sample_value === name).name).toLowerCase());
    const rows = samples.map(({ index, text, target, answer, values, baseline, seconds }) => ({
      index,
      text,
      target,
      answer: answer.trim(),
      marks: metrics.map((name) => values[name] ?? null),
      baseline: metrics.map((name) => baseline[name] ?? null),
      ms: Math.round(seconds * 1000),
    }));
    const PAGE = 20;
    const SIGNS = { 0: "\u2717", 1: "\u2713" };
    const COLOURS = { 0: "bad", 1: "good" };
    const differs = (row) => row.marks.some((mark, i) => row.baseline[i] !== null && row.baseline[i] !== mark);
    const filters = {
      all: ["all samples", () => true],
      ...Object.fromEntries(
        metrics.flatMap((_, i) => [
          [`right${i}`, [`${titles[i]} right`, (row) => row.marks[i] === 1]],
          [`wrong${i}`, [`${titles[i]} wrong`, (row) => row.marks[i] === 0]],
        ]),
      ),
      ...(rows.some((row) => row.baseline.some((each) => each !== null))
        ? { differs: ["differs from the baseline", differs] }
        : {}),
    };
    const search = make("input", { id: "search", type: "search", placeholder: "Search the samples", "aria-label": "Search the samples" });
    const filter = make(
      "select",
      { id: "filter", "aria-label": "Which samples" },
      ...Object.entries(filters).map(([value, [text]]) => make("option", { value }, text)),
    );
    const [count, place] = [make("span", { id: "count" }), make("span", { id: "page" })];
    const [previous, next] = ["Back", "Next"].map((text) => make("button", { type: "button", id: text.toLowerCase() }, text));
    const body = make("tbody", { id: "rows" });
    const head = [["number", "#"], ["", "passage"], ["", "expected"], ["", "answer"], ...titles.map((each) => ["mark", each]), ["number time", "ms"]];
    let found = rows;
    let at = 0;

    const highlight = (text, words) => {
      const start = words ? text.toLowerCase().indexOf(words) : -1;
      if (start < 0) return make("span", {}, text);
      const end = start + words.length;
      return make("span", {}, text.slice(0, start), make("mark", {}, text.slice(start, end)), text.slice(end));
    };
    const tableRow = (row, words) => {
      const number = make("button", { type: "button", "aria-expanded": "false" }, row.index);
      const tr = make(
        "tr",
        {},
        make("td", { class: "number soft" }, number),
        make("td", { class: "passage" }, highlight(row.text, words)),
        make("td", { class: "answer" }, row.target),
        make("td", { class: "answer soft" }, row.answer),
        ...row.marks.map((mark) => make("td", { class: `mark ${COLOURS[mark] ?? "soft"}` }, SIGNS[mark] ?? (mark === null ? "" : numberText(mark)))),
        make("td", { class: "number soft time" }, row.ms),
      );
      if (differs(row)) {
        tr.classList.add("differs");
        tr.title = "differs from the baseline";
      }
      tr.addEventListener("click", ({ target }) => {
        if (target !== number && String(getSelection())) return; // the user is selecting text
        number.setAttribute("aria-expanded", String(tr.classList.toggle("whole")));
      });
      return tr;
    };
    const show = () => {
      const words = search.value.trim().toLowerCase();
      const pages = Math.max(1, Math.ceil(found.length / PAGE));
      at = Math.min(at, pages - 1);
      body.replaceChildren(...found.slice(at * PAGE, (at + 1) * PAGE).map((row) => tableRow(row, words)));
      count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} samples`;
      place.textContent = `page ${at + 1} of ${pages}`;
      previous.disabled = at === 0;
      next.disabled = at === pages - 1;
    };
    const select = () => {
      const words = search.value.trim().toLowerCase();
      const [, keep] = filters[filter.value];
      const text = (row) => `${row.index} ${row.text} ${row.target} ${row.answer}`.toLowerCase();
      found = rows.filter((row) => keep(row) && (!words || text(row).includes(words)));
      at = 0;
      show();
    };
    const turn = (by) => () => {
      at += by;
      show();
    };
    search.addEventListener("input", select);
    filter.addEventListener("change", select);
    previous.addEventListener("click", turn(-1));
    next.addEventListener("click", turn(1));
    const headRow = make("tr", {}, ...head.map(([kind, text]) => make("th", { class: kind, scope: "col" }, text)));
    main.append(
      make("h2", {}, "Samples"),
      make("p", { class: "lead" }, "Click a row to read it whole."),
      make(
        "div",
        { class: "card" },
        make("div", { class: "tools" }, search, filter, count),
        make("div", { class: "scroll" }, make("table", { id: "samples" }, make("thead", {}, headRow), body)),
        make("div", { class: "pager" }, place, previous, next),
      ),
    );
    select();
  };
  if (page.samples?.length) showSamples(page.samples, page.report);
})();
