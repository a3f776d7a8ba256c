// What the tests ask of the page; `lab.py` puts it there before JupyterLab is loaded.
// A promise is never given back to the test, which would wait for it without a limit: it leaves a mark in
// `inPage.marks` instead, and the test waits for that.
window.inPage = {
  marks: {},
  received: 0,

  get panel() { return window.jupyterapp?.shell?.currentWidget; },
  get session() { return this.panel?.context?.sessionContext; },
  get kernel() { return this.session?.session?.kernel; },
  get cells() { return this.panel?.content?.widgets ?? []; },

  // Running before the session is ready opens a "Select Kernel" dialog, or runs the first cell only.
  ready() {
    return !!this.session?.isReady && this.kernel?.connectionStatus === 'connected' && this.kernel.status === 'idle';
  },
  begin(mark, promise) {
    this.marks[mark] = 'going';
    promise.then(() => { this.marks[mark] = 'done'; }, (error) => { this.marks[mark] = `failed: ${error}`; });
  },
  command(name, args, mark) { this.begin(mark, window.jupyterapp.commands.execute(name, args)); },
  choose(i) {
    this.panel.content.activeCellIndex = i;
    this.panel.content.deselectAll();
  },
  restart() { this.begin('restart', this.kernel.restart()); },
  shows(path) { return this.panel?.context?.path === path && this.panel.context.isReady && this.cells.length > 0; },
  async end() {
    const panel = this.panel;
    if (panel?.context?.sessionContext?.session) await panel.context.sessionContext.shutdown();
    panel?.dispose();
  },
  close() { this.begin('close', this.end()); },

  ask(code) {
    const found = this.asked = {text: '', error: '', done: false};
    const future = this.kernel.requestExecute({code, store_history: false});
    future.onIOPub = (message) => {
      const {header, content} = message;
      if (header.msg_type === 'stream') found.text += content.text;
      if (header.msg_type === 'error') found.error = `${content.ename}: ${content.evalue}`;
    };
    future.done.then(() => { found.done = true; }, () => { found.done = true; });
  },

  outputs(i) { return JSON.stringify(this.cells[i].model.outputs.toJSON()); },
  text(i) { return this.cells[i].outputArea.node.textContent; },
  trusted() { return this.cells.filter((c) => c.model.type === 'code').map((c) => c.model.trusted); },

  // Runs a cell and notes how long it takes until its output, laid out, contains a text.
  time(i, text) {
    this.choose(i);
    this.took = null;
    this.cells[i].model.outputs.clear();
    const began = performance.now();
    const look = () => {
      const area = this.cells[i].outputArea.node;
      if (area.textContent.includes(text) && area.offsetHeight > 0) this.took = (performance.now() - began) / 1000;
      else requestAnimationFrame(look);
    };
    this.command('notebook:run-cell', {}, 'cell');
    requestAnimationFrame(look);
  },

  // Opens, or closes, what is folded.
  fold(open) {
    for (const cell of this.cells) {
      for (const e of cell.outputArea?.node.querySelectorAll('details') ?? []) e.open = open;
    }
  },

  // Every visible piece of text in the outputs, with its contrast (1 to 21) with what is painted behind it.
  contrasts() {
    const out = [];
    for (const [i, cell] of this.cells.entries()) {
      if (cell.model.type !== 'code') continue;
      const walk = document.createTreeWalker(cell.outputArea.node, NodeFilter.SHOW_TEXT);
      for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        const text = node.textContent.trim(), element = node.parentElement;
        if (!text || !element.checkVisibility() || element.closest('.jp-OutputPrompt')) continue;
        out.push({cell: i, text: text.slice(0, 60), tag: element.tagName, ratio: contrast(element)});
      }
    }
    return out;
  },
};

function numbers(colour) {
  const found = colour.match(/[\d.]+/g).map(Number);
  return found.length < 4 ? [...found, 1] : found;
}

function over([r, g, b, a], [R, G, B]) {
  return [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
}

function luminance(rgb) {
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = rgb.map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(element) {
  const up = [];
  for (let e = element; e; e = e.parentElement) up.unshift(e);
  let ground = [255, 255, 255], shown = 1;
  for (const e of up) {
    const style = getComputedStyle(e);
    shown *= Number(style.opacity);
    ground = over(numbers(style.backgroundColor), ground);
  }
  const [r, g, b, a] = numbers(getComputedStyle(element).color);
  const [high, low] = [luminance(over([r, g, b, a * shown], ground)), luminance(ground)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
}

window.WebSocket = class extends window.WebSocket {
  constructor(...how) {
    super(...how);
    this.addEventListener('message', ({data}) => {
      inPage.received += typeof data === 'string' ? new TextEncoder().encode(data).length : data.byteLength ?? data.size;
    });
  }
};
