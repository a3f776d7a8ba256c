// The widgets of interlens: plain DOM, text as text (textContent only), no library, nothing fetched.

const INK = "var(--jp-ui-font-color1, #1f2328)";
const PAPER = "var(--jp-layout-color1, #ffffff)";
const EDGE = "var(--jp-border-color2, #c8c8c8)";
const MARK = "var(--jp-brand-color1, #1976d2)";
const BORDERS = ["#2563eb", "#dc501e", "#0f766e", "#9333ea", "#a16207", "#64748b"];

function make(tag, style = {}, text = null) {
  const node = document.createElement(tag);
  Object.assign(node.style, style);
  if (text !== null) node.textContent = text;
  return node;
}

function button(text, act, label = text) {
  const node = make("button", {
    color: INK, background: PAPER, border: `1px solid ${EDGE}`, borderRadius: "3px",
    padding: "2px 10px", cursor: "pointer", font: "inherit",
  }, text);
  node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  return node;
}

function field(tag, style = {}) {
  return make(tag, {
    color: INK, background: PAPER, border: `1px solid ${EDGE}`, borderRadius: "3px",
    padding: "2px 6px", font: "inherit", ...style,
  });
}

function choice(options, value, act, label) {
  const node = field("select");
  node.setAttribute("aria-label", label);
  for (const [key, text] of options) {
    const option = make("option", {}, text);
    option.value = key;
    node.append(option);
  }
  node.value = value;
  node.addEventListener("change", () => act(node.value));
  return node;
}

function row(...children) {
  const node = make("div", { display: "flex", gap: "8px", alignItems: "center", flexWrap: "wrap", margin: "4px 0" });
  node.append(...children);
  return node;
}

function said(author, note, place, body) {
  const node = make("div", {
    borderLeft: `3px solid ${BORDERS[place % BORDERS.length]}`, padding: "0 0 0 10px", margin: "8px 0",
  });
  const head = make("div");
  head.append(make("b", {}, author), make("span", { opacity: 0.7, fontSize: "85%" }, note ? ` ${note}` : ""));
  const words = make("div", { whiteSpace: "pre-wrap", overflowWrap: "anywhere" });
  if (typeof body === "string") words.textContent = body; else words.append(body);
  node.append(head, words);
  return node;
}

function frame(el) {
  const node = make("div", {
    color: INK, background: PAPER, border: `1px solid ${EDGE}`, borderRadius: "4px", padding: "8px 12px",
    fontFamily: "var(--jp-ui-font-family, system-ui, sans-serif)", fontSize: "var(--jp-ui-font-size1, 13px)",
    lineHeight: "1.45",
  });
  // Arrows and letters are the widget's: JupyterLab would take them for its own, on the way down and on the way up.
  node.dataset.lmSuppressShortcuts = "true";
  node.addEventListener("keydown", (event) => event.stopPropagation());
  el.append(node);
  return node;
}

function set(model, values) {
  for (const [key, value] of Object.entries(values)) model.set(key, value);
  model.save_changes();
}

// -- explore: tokens with a number for every layer

function explore(model, el) {
  const box = frame(el);
  const layers = model.get("layers"), messages = model.get("messages"), tops = model.get("tops");
  const bytes = model.get("values");
  const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  const total = layers.length ? values.length / layers.length : 0;
  const slider = make("input", { flex: "1", minWidth: "160px" });
  Object.assign(slider, { type: "range", min: 0, max: Math.max(0, layers.length - 1), step: 1 });
  slider.setAttribute("aria-label", "layer");
  const told = make("span", { minWidth: "7em" });
  const speakers = [["", "everybody"], ...[...new Set(messages.map((m) => m.author))].map((a) => [a, a])];
  const who = choice(speakers, model.get("speaker"), (v) => set(model, { speaker: v }), "speaker");
  const pointed = make("span", { fontFamily: "monospace", minHeight: "1.4em" }, " ");
  const words = make("div", { maxHeight: "460px", overflowY: "auto" });
  const pins = make("div");
  box.append(row(make("b", {}, model.get("name")), who), row(told, slider), row(pointed), words, pins);

  const at = (layer, token) => values[layer * total + token];
  const colour = (layer, token) => {
    const v = at(layer, token);
    if (!Number.isFinite(v)) return "";
    const a = Math.min(1, Math.abs(v) / (tops[layer] || 1));
    const step = Math.round(a * 8);
    return step ? `rgba(${v > 0 ? "37,99,235" : "220,80,30"},${((0.55 * step) / 8).toFixed(2)})` : "";
  };
  const spans = [];
  const blocks = messages.map((m) => {
    const body = make("span");
    m.tokens.forEach((text, i) => {
      const token = m.start + i;
      const node = make("span", { cursor: "pointer", borderRadius: "2px" }, text);
      node.addEventListener("mouseenter", () => point(token));
      node.addEventListener("click", () => {
        const pinned = model.get("pinned");
        set(model, { pinned: pinned.includes(token) ? pinned.filter((p) => p !== token) : [...pinned, token] });
      });
      spans[token] = node;
      body.append(node);
    });
    const node = said(m.author, m.note, m.place, body);
    words.append(node);
    return [m.author, node];
  });
  const number = (v) => (Number.isFinite(v) ? v.toPrecision(4) : "no number");
  const shown = (token) => JSON.stringify(spans[token].textContent);
  const point = (token) => { pointed.textContent = `${shown(token)} ${number(at(model.get("layer"), token))}`; };
  const paint = () => {
    const layer = model.get("layer");
    slider.value = layer;
    told.textContent = layers.length ? `layer ${layers[layer]} of ${layers[layers.length - 1]}` : "no layer";
    spans.forEach((node, token) => { node.style.background = colour(layer, token); });
    mark();
  };
  const mark = () => {
    const pinned = model.get("pinned"), layer = model.get("layer");
    spans.forEach((node, token) => { node.style.outline = pinned.includes(token) ? `2px solid ${MARK}` : ""; });
    pins.replaceChildren(...pinned.filter((t) => spans[t]).map((token) => {
      const bars = make("span", { display: "inline-flex", alignItems: "center", height: "26px", gap: "1px" });
      layers.forEach((name, i) => {
        const v = at(i, token), part = Number.isFinite(v) ? Math.min(1, Math.abs(v) / (tops[i] || 1)) : 0;
        const bar = make("span", {
          width: "7px", height: `${2 + 22 * part}px`, outline: i === layer ? `1px solid ${MARK}` : "",
          background: v > 0 ? "rgb(37,99,235)" : "rgb(220,80,30)", display: "inline-block",
        });
        bar.title = `layer ${name}: ${number(v)}`;
        bars.append(bar);
      });
      return row(make("code", {}, shown(token)), bars, make("span", {}, number(at(layer, token))),
        button("×", () => set(model, { pinned: model.get("pinned").filter((p) => p !== token) }), "unpin"));
    }));
  };
  const filter = () => {
    const name = model.get("speaker");
    who.value = name;
    blocks.forEach(([author, node]) => { node.style.display = !name || author === name ? "" : "none"; });
  };
  slider.addEventListener("input", () => set(model, { layer: Number(slider.value) }));
  model.on("change:layer", paint);
  model.on("change:pinned", mark);
  model.on("change:speaker", filter);
  paint();
  filter();
}

// -- browse: the jobs of a run on the left, what was said on the right

function browse(model, el) {
  const box = frame(el);
  const query = field("input", { flex: "1", minWidth: "140px" });
  query.placeholder = model.get("searches");
  query.setAttribute("aria-label", "search");
  const outcomes = [["", "every outcome"], ...Object.entries(model.get("counts")).map(([k, n]) => [k, `${k} (${n})`])];
  const outcome = choice(outcomes, model.get("outcome"), (v) => set(model, { outcome: v, page: 0 }), "outcome");
  const failure = button("next failure", () => model.send({ next: "failed" }));
  const before = button("‹", () => set(model, { page: Math.max(0, model.get("page") - 1) }), "page before");
  const after = button("›", () => set(model, { page: model.get("page") + 1 }), "next page");
  const where = make("span", { opacity: 0.8 });
  const table = make("table", { borderCollapse: "collapse", fontSize: "90%", width: "100%" });
  const left = make("div", { flex: "1 1 320px", maxHeight: "460px", overflowY: "auto" });
  const right = make("div", { flex: "2 1 360px", maxHeight: "460px", overflowY: "auto", paddingLeft: "12px" });
  const both = make("div", { display: "flex", flexWrap: "wrap" });
  left.append(table);
  both.append(left, right);
  box.append(make("b", {}, model.get("name")), row(query, outcome, failure), row(before, where, after), both);
  const cell = { padding: "2px 8px 2px 0", textAlign: "left", verticalAlign: "top" };
  const list = () => {
    const columns = model.get("columns"), rows = model.get("rows"), sort = model.get("sort");
    const head = make("tr");
    columns.forEach((name) => {
      const arrow = name === sort ? (model.get("descending") ? " ▼" : " ▲") : "";
      const th = make("th", { ...cell, cursor: "pointer", borderBottom: `1px solid ${EDGE}` }, name + arrow);
      th.addEventListener("click", () =>
        set(model, { sort: name, descending: name === sort ? !model.get("descending") : false, page: 0 }));
      head.append(th);
    });
    const body = rows.map((values) => {
      const tr = make("tr", { cursor: "pointer" });
      if (values[0] === model.get("selected")) tr.style.outline = `2px solid ${MARK}`;
      values.forEach((v) => tr.append(make("td", cell, v === null ? "" : String(v))));
      tr.addEventListener("click", () => set(model, { selected: values[0] }));
      return tr;
    });
    table.replaceChildren(head, ...body);
    const chosen = body.find((tr) => tr.firstChild.textContent === model.get("selected"));
    if (chosen) left.scrollTop = Math.max(0, chosen.offsetTop - table.offsetTop - left.clientHeight / 2);
    const page = model.get("page"), size = model.get("page_size"), found = model.get("found");
    where.textContent = found ? `${page * size + 1}–${Math.min(found, (page + 1) * size)} of ${found}` : "none found";
    before.disabled = page === 0;
    after.disabled = (page + 1) * size >= found;
  };
  const read = () => {
    const { title, messages, notes } = model.get("transcript");
    const parts = [make("b", {}, title || "choose a job")];
    (messages || []).forEach((m) => parts.push(said(m.author, m.note, m.place, m.content)));
    (notes || []).forEach((n) => parts.push(make("pre", { whiteSpace: "pre-wrap" }, n)));
    right.replaceChildren(...parts);
    right.scrollTop = 0;
  };
  let waiting = null;
  query.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => set(model, { query: query.value, page: 0 }), 200);
  });
  for (const name of ["rows", "selected", "found"]) model.on(`change:${name}`, list);
  model.on("change:transcript", read);
  model.on("change:outcome", () => { outcome.value = model.get("outcome"); });
  list();
  read();
}

// -- steering: one turn, with and without

function steering(model, el) {
  const box = frame(el);
  const range = (name, low, high, step) => {
    const slider = make("input", { flex: "1", minWidth: "140px" });
    Object.assign(slider, { type: "range", min: low, max: high, step });
    slider.setAttribute("aria-label", name);
    const told = make("span", { minWidth: "8em" });
    const paint = () => { slider.value = model.get(name); told.textContent = `${name} ${model.get(name)}`; };
    slider.addEventListener("input", () => set(model, { [name]: Number(slider.value) }));
    model.on(`change:${name}`, paint);
    paint();
    return row(told, slider);
  };
  const names = model.get("names").map((n) => [n, n]);
  const direction = choice(names, model.get("direction"), (v) => set(model, { direction: v }), "direction");
  const go = button("generate", () => model.send({ act: "generate" }));
  const stop = button("stop", () => model.send({ act: "stop" }));
  const state = make("span", { opacity: 0.8 });
  const plain = make("div", { flex: "1 1 280px" }), pushed = make("div", { flex: "1 1 280px" });
  const both = make("div", { display: "flex", flexWrap: "wrap", gap: "12px" });
  both.append(plain, pushed);
  box.append(make("b", {}, model.get("name")), row(make("span", {}, "direction"), direction),
    range("layer", 0, model.get("depth") - 1, 1), range("strength", -model.get("limit"), model.get("limit"), model.get("limit") / 40),
    row(go, stop, state), both);
  const paint = () => {
    const a = model.get("plain"), b = model.get("steered");
    plain.replaceChildren(said(a.author, a.note, 0, a.content));
    pushed.replaceChildren(said(b.author, b.note, 1, b.content));
    const busy = model.get("busy");
    go.disabled = busy;
    stop.disabled = !busy;
    state.textContent = model.get("error") || (busy ? "generating …" : "");
  };
  for (const name of ["plain", "steered", "busy", "error"]) model.on(`change:${name}`, paint);
  paint();
}

// -- chat: a person takes a seat

function chat(model, el) {
  const box = frame(el);
  const words = make("div", { maxHeight: "420px", overflowY: "auto" });
  const input = field("textarea", { flex: "1", minHeight: "3em", resize: "vertical" });
  input.placeholder = `say something as ${model.get("seat")}; Enter sends, Shift+Enter begins a line`;
  input.setAttribute("aria-label", "message");
  const state = make("span", { opacity: 0.8 });
  const speak = () => {
    if (model.get("busy") || !input.value.trim()) return;
    model.send({ act: "say", text: input.value });
  };
  const heard = () => { // the field is emptied when the words are in the conversation
    if (model.get("messages").some((m) => m.author === model.get("seat") && m.content === input.value)) input.value = "";
  };
  const go = button("send", speak);
  const on = button("let them go on", () => model.send({ act: "go" }));
  const stop = button("stop", () => model.send({ act: "stop" }));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); speak(); }
  });
  box.append(words, row(input), row(go, on, stop, state));
  const paint = () => {
    const blocks = model.get("messages").map((m) => said(m.author, m.note, m.place, m.content));
    const draft = model.get("draft");
    if (draft.content) {
      const node = said(draft.author, draft.note, draft.place, draft.content);
      node.style.opacity = 0.7;
      blocks.push(node);
    }
    words.replaceChildren(...blocks);
    words.scrollTop = words.scrollHeight;
    const busy = model.get("busy");
    go.disabled = busy;
    on.disabled = busy;
    stop.disabled = !busy;
    state.textContent = model.get("error") || (busy ? "speaking …" : "");
  };
  model.on("change:messages", heard);
  for (const name of ["messages", "draft", "busy", "error"]) model.on(`change:${name}`, paint);
  paint();
}

const VIEWS = { explore, browse, steering, chat };

export default {
  render({ model, el }) {
    VIEWS[model.get("kind")](model, el);
  },
};
