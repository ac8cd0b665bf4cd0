// SPDX-License-Identifier: MIT
// The page: shows what the workers report and passes on what the reader does. Training is in worker.js, proofs and
// single ops are in prover.js; nothing is computed here but pictures of numbers.

import {Chart} from './chart.js';
import {Gradient} from './gradient.js';
import {Prove, Prover} from './prove.js';

const $ = (id) => document.getElementById(id);
const TEXTS = [
    {name: 'sources.txt', label: "vjp's own C sources", prompt: 'static '},
    {name: 'docs.txt', label: "vjp's documentation", prompt: 'The '},
];
/* Sizes to choose from: those of presets of `vjp train`, and two that are smaller. */
const SIZES = [
    {name: 'nano', label: 'nano, 0.1 M', preset: 'tiny', dim: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 176, context: 64, batch: 8},
    {name: 'micro', label: 'micro, 0.4 M', preset: 'tiny', dim: 96, layers: 3, heads: 4, kv_heads: 2, ffn: 264, context: 64, batch: 8},
    {name: 'tiny', label: 'tiny, 0.8 M', preset: 'tiny', dim: 128, layers: 4, heads: 4, kv_heads: 2, ffn: 352, context: 128, batch: 8},
    {name: 'small', label: 'small, 9.6 M', preset: 'small', dim: 384, layers: 6, heads: 6, kv_heads: 2, ffn: 1024, context: 128, batch: 4},
    {name: 'medium', label: 'medium, 76 M', preset: 'medium', dim: 768, layers: 12, heads: 12, kv_heads: 4, ffn: 2048, context: 128, batch: 2},
];
const SHAPE = ['dim', 'layers', 'heads', 'kv_heads', 'ffn'];
const DEFAULTS = {size: 'micro', steps: 2000, lr: 0.003, seed: 1, dtype: 'f32'};
const SAMPLES_KEPT = 12;
const COMPARED = 100; // steps of a GPU that the processor takes, too

const chart = new Chart($('chart'), $('readout'));
const texts = new Map(); // name to {label, prompt, bytes}
let worker = null, module = null, asked = ''; // the device that the module was loaded for
let twin = null; // a worker that trains the same on the processor, where a GPU trains
let state = {begun: false, running: false, over: false, hidden: false};
let current = null; // the run's settings and the name of its text
let shown = null;   // the settings of the last run, of which a size that has no name is kept
let frame = 0, lastSpoken = 0;
const recent = []; // [time in the worker, step] of the last steps
let latest = null; // the last step's figures, drawn at the next frame

/* ---- Words ---- */

const thousands = (n) => n < 1e4 ? String(Math.round(n)) : n < 1e7 ? `${(n / 1e3).toFixed(1)}k` : `${(n / 1e6).toFixed(1)}M`;
const bytesText = (n) => n < 1e6 ? `${Math.ceil(n / 1e3)} KB` : n < 1e9 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} MB` : `${(n / 1e9).toFixed(2)} GB`;

function duration(seconds) {
    const s = Math.round(seconds);
    if (s < 100) return `${s} s`;
    return s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

function say(sentence) {
    $('status').textContent = sentence;
}

function alertWith(sentence) {
    $('alert').hidden = !sentence;
    $('alert').textContent = sentence;
}

function note(id, sentence) {
    const old = document.querySelector(`#notes [data-id="${id}"]`), item = old || document.createElement('li');
    item.dataset.id = id;
    item.textContent = sentence;
    if (!old) $('notes').append(item);
}

/* ---- Settings ---- */

function option(select, value, label, disabled = false) {
    const item = new Option(label, value);
    item.disabled = disabled;
    select.add(item);
}

function fillSettings() {
    for (const {name, label} of SIZES) option($('set-size'), name, label);
    for (const {name, label} of TEXTS) option($('set-text'), name, label);
    const cores = navigator.hardwareConcurrency || 1;
    if (self.crossOriginIsolated && cores > 1) option($('set-device'), String(Math.min(cores, 8)), `Processor, ${Math.min(cores, 8)} threads`);
    option($('set-device'), '1', 'Processor, 1 thread');
    option($('set-device'), 'gpu', 'GPU', true);
    if (!self.crossOriginIsolated)
        note('threads', 'The server did not isolate this page, so memory cannot be shared between threads: it trains with one.');
    showSettings({...DEFAULTS, ...sizeOf(DEFAULTS.size)}, TEXTS[0].name);
    $('set-size').value = DEFAULTS.size;
}

/* What is missing for the GPU; '' if nothing is, and its name is among the devices. */
async function missingForGpu() {
    if (!navigator.gpu) return 'this browser has no WebGPU';
    if (!self.crossOriginIsolated) return 'its worker needs shared memory, which the server did not allow';
    const adapter = await navigator.gpu.requestAdapter().catch(() => null);
    if (!adapter) return 'this browser has WebGPU, but gives no adapter';
    const {vendor, architecture, description} = adapter.info;
    const item = $('set-device').querySelector('[value=gpu]');
    const name = [vendor, architecture, description].filter((w) => w).join(' '); // a browser may keep it to itself
    item.textContent = name ? `GPU: ${name}` : 'GPU';
    item.disabled = false;
    return '';
}

async function offerGpu() {
    const missing = await missingForGpu();
    if (missing) note('gpu', `The GPU is not used: ${missing}. It trains on the processor.`);
    else if (localStorage.getItem('device') === 'gpu') $('set-device').value = 'gpu';
}

const sizeOf = (name) => SIZES.find((size) => size.name === name);

/* The size that has these numbers; undefined: another one. */
const sizeWith = (settings) => SIZES.find((size) => SHAPE.every((key) => size[key] === settings[key]));

function showSettings(settings, text) {
    for (const key of ['context', 'batch', 'steps', 'lr', 'seed', 'dtype'])
        if (settings[key] !== undefined) $(`set-${key}`).value = settings[key];
    if (settings.dim) {
        const size = sizeWith(settings);
        if (!size && !$('set-size').querySelector('[value=other]')) option($('set-size'), 'other', 'another size');
        $('set-size').value = size ? size.name : 'other';
    }
    $('set-text').value = text;
}

function readSettings() {
    const size = $('set-size').value, own = sizeOf(size) || shown;
    const settings = {preset: own.preset, dtype: $('set-dtype').value};
    if (size !== own.preset) for (const key of SHAPE) settings[key] = own[key];
    for (const key of ['context', 'batch', 'steps', 'lr', 'seed']) settings[key] = Number($(`set-${key}`).value);
    settings.validate_every = Math.max(20, Math.round(settings.steps / 100));
    return settings;
}

const chosen = () => $('set-device').value;

function addText(name, bytes, label = name, prompt = '') {
    if (!texts.has(name) && ![...$('set-text').options].some((o) => o.value === name)) option($('set-text'), name, label);
    // A text that has no prompt of its own begins with its first word.
    const first = prompt || new TextDecoder().decode(bytes.subarray(0, 64)).split(/\s/).find((w) => w) + ' ';
    texts.set(name, {label, bytes, prompt: first.slice(0, 24)});
}

/* Settings that this page does not offer, as options of `vjp train` with their defaults: an imported run may have others. */
const OPTIONS = {
    optimizer: ['optimizer', 'adamw'], schedule: ['schedule', 'cosine'], warmup: ['warmup', 20], accumulate: ['accumulate', 1],
    last_rate: ['last-lr', 0.1], weight_decay: ['weight-decay', 0.1], max_norm: ['clip', 1], beta2: ['beta2', 0.95],
    average: ['average', 0], label_smoothing: ['label-smoothing', 0],
};

/* The command that computes the same losses natively. */
function command(step) {
    const {settings, name} = current;
    if (settings.from) return 'This run began with weights that were imported: the same command would need them.';
    const file = /^[\w.+:=@%-]+$/.test(name) && name[0] !== '-' ? name : `'${name.replaceAll("'", "'\\''")}'`;
    const size = sizeWith(settings), usual = size && size.name === settings.preset;
    const shape = usual ? '' : SHAPE.map((key) => `--${key.replace('_', '-')} ${settings[key]} `).join('');
    return `vjp train ${file} --preset ${settings.preset} ${shape}--context ${settings.context} --batch ${settings.batch} ` +
        `--steps ${settings.steps} --lr ${settings.lr} --seed ${settings.seed} --dtype ${settings.dtype} ` +
        Object.entries(OPTIONS).filter(([key, [, usual]]) => settings[key] !== undefined && settings[key] !== usual)
            .map(([key, [name]]) => `--${name} ${settings[key]} `).join('') + `--stop-at ${step} --out compare-${step}`;
}

/* ---- What is shown ---- */

function controls() {
    const {begun, running, over} = state;
    $('start').disabled = !module || over;
    $('start').textContent = running ? 'Pause' : 'Start';
    $('step').disabled = !module || running || over;
    $('reset').disabled = !module || !begun;
    $('fields').disabled = begun;
    $('settings-hint').textContent = begun ? 'Reset to change them.' : '';
    $('export').disabled = $('export-weights').disabled = !begun || !chart.losses.length;
    $('forget').disabled = !begun;
}

function drawLatest() {
    frame = 0;
    chart.draw();
    if (!latest || !current) return;
    const n = chart.losses.length, {steps} = current.settings;
    $('loss').textContent = chart.smooth[n - 1].toFixed(3);
    $('steps').textContent = String(n);
    $('progress').style.width = `${(100 * n) / steps}%`;
    if (chart.validations.length) $('validation').textContent = chart.validations.at(-1)[1].toFixed(3);
    const due = n > current.settings.validate_every;
    $('validation-means').textContent = due && !chart.validations.length ? 'the text is too short' : 'text it never trains on';
    if (latest.memory) $('memory').textContent = bytesText(latest.memory);
    $('hash').value = latest.hash || '–';
    $('hash-step').textContent = n === 1 ? 'after 1 step' : `after ${n} steps`;
    $('command').textContent = command(n);
    if (recent.length > 1) {
        const [t0, s0] = recent[0], [t1, s1] = recent.at(-1), each = (t1 - t0) / (s1 - s0);
        $('speed').textContent = thousands((current.settings.batch * current.settings.context * 1000) / each);
        $('step-ms').textContent = `${each < 10 ? each.toFixed(1) : Math.round(each)} ms per step`;
        $('left').textContent = n < steps ? `of ${steps}, ${duration(((steps - n) * each) / 1000)} left` : `of ${steps}`;
    } else {
        $('left').textContent = `of ${steps}`;
    }
    const now = performance.now();
    if (now - lastSpoken > 10000) {
        lastSpoken = now;
        $('chart').setAttribute('aria-label', `Loss curve: ${n} steps, from ${chart.losses[0].toFixed(2)} down to an average of ` +
            `${chart.smooth[n - 1].toFixed(2)}. Left and right arrow keys read single steps.`);
    }
}

function redraw() {
    if (!frame) frame = requestAnimationFrame(drawLatest);
}

function showSample({step, prompt, text}) {
    if ($('sample').dataset.step) {
        const item = document.createElement('li'), pre = document.createElement('pre'), head = document.createElement('span');
        head.className = 'small';
        head.textContent = `step ${$('sample').dataset.step}`;
        pre.textContent = $('sample').textContent;
        item.append(head, pre);
        $('earlier').prepend(item);
        // Of many samples the first ones and those at about equal ratios of steps are kept.
        const items = [...$('earlier').children];
        if (items.length > SAMPLES_KEPT) {
            const at = items.map((i) => Number(i.firstChild.textContent.slice(5)));
            let drop = 1;
            for (let i = 1; i < items.length - 1; i++) if (at[i - 1] / at[i + 1] < at[drop - 1] / at[drop + 1]) drop = i;
            items[drop].remove();
        }
    }
    const begin = document.createElement('span');
    begin.className = 'prompt';
    begin.textContent = prompt;
    $('sample').replaceChildren(begin, text.startsWith(prompt) ? text.slice(prompt.length) : text);
    $('sample').dataset.step = step;
    $('sample-step').textContent = `after ${step} step${step === 1 ? '' : 's'}`;
}

function showProfile(rows) {
    const by = new Map();
    let all = 0;
    for (const {op, ms} of rows) {
        by.set(op, (by.get(op) || 0) + ms);
        all += ms;
    }
    if (!all) return;
    const sorted = [...by].sort((a, b) => b[1] - a[1]), top = sorted.slice(0, 6);
    const rest = sorted.slice(6).reduce((sum, [, ms]) => sum + ms, 0);
    if (rest) top.push([`${sorted.length - 6} others`, rest]);
    $('bar').replaceChildren(...top.map(([, ms], i) => {
        const part = document.createElement('div');
        part.style.flexGrow = ms / all;
        part.style.background = `var(--hue-${i})`;
        return part;
    }));
    $('ops').replaceChildren(...top.map(([op, ms], i) => {
        const item = document.createElement('li'), dot = document.createElement('i');
        dot.style.background = `var(--hue-${i})`;
        const words = [op, `${ms.toFixed(ms < 10 ? 2 : 1)} ms`, `${((100 * ms) / all).toFixed(0)} %`];
        item.append(dot, ...words.map((w) => Object.assign(document.createElement('span'), {textContent: w})));
        return item;
    }));
}

/* ---- A GPU beside the processor ---- */

/* What vjp.js takes to begin the run that has these settings. */
function given(settings) {
    const {preset, context, batch, steps, lr, seed, dtype, last_rate, max_norm, optimizer, schedule, warmup, accumulate,
           weight_decay, beta2, average, label_smoothing} = settings;
    const all = {preset, context, batch, steps, lr, seed, dtype, last_lr: last_rate, clip: max_norm, optimizer, schedule,
                 warmup, accumulate, weight_decay, beta2, average, label_smoothing, validate_every: 0};
    for (const key of SHAPE) all[key] = settings[key];
    return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== undefined));
}

function endTwin() {
    if (twin) twin.terminate();
    twin = null;
    $('key-other').hidden = $('compare').hidden = true;
}

/* Another worker takes the first steps of a GPU's run on the processor. */
function beginTwin(settings, text) {
    endTwin();
    if (!module.gpu) return;
    $('compare').hidden = false;
    $('compare').textContent = settings.from ? 'This run began with weights that were imported: it is not compared with the processor.' : '';
    if (settings.from) return;
    $('key-other').hidden = false;
    twin = new Worker('worker.js', {type: 'module'});
    twin.onmessage = ({data}) => {
        if (data.kind === 'failed') $('compare').textContent = `The processor could not be compared: ${data.sentence}`;
        if (data.kind !== 'twin') return;
        chart.addOther(data.loss);
        showDifference();
        redraw();
    };
    const cores = self.crossOriginIsolated ? navigator.hardwareConcurrency || 1 : 1;
    twin.postMessage({kind: 'twin', variant: Prover.variant, threads: Math.max(1, Math.min(cores, 8) - 1), settings: given(settings), text});
}

function followTwin() {
    if (twin) twin.postMessage({kind: 'follow', step: Math.min(chart.losses.length, COMPARED)});
}

function showDifference() {
    const n = Math.min(chart.others.length, chart.losses.length);
    let largest = 0, at = 1;
    for (let i = 0; i < n; i++) {
        const difference = Math.abs(chart.others[i] - chart.losses[i]);
        if (!(difference <= largest)) [largest, at] = [difference, i + 1];
    }
    const far = largest ? `differ by at most ${largest.toExponential(1)}, at step ${at}` : 'are equal';
    $('compare').textContent = `Laid over the processor's curve: in ${n} step${n === 1 ? '' : 's'} the losses ${far}.` +
        `${n === COMPARED ? ' The processor stops there.' : ''}`;
}

function clearRun() {
    endTwin();
    state = {...state, begun: false, running: false, over: false};
    current = latest = null;
    recent.length = 0;
    chart.clear(Number($('set-steps').value) || 1);
    for (const id of ['loss', 'validation', 'speed']) $(id).textContent = '–';
    $('steps').textContent = '0';
    $('left').textContent = $('step-ms').textContent = '\u00a0';
    $('progress').style.width = '0';
    $('hash').value = '–';
    $('hash-step').textContent = 'no steps yet';
    $('command').textContent = '';
    $('sample').textContent = 'It has not learned anything yet.';
    $('sample').dataset.step = '';
    $('sample-step').textContent = '';
    $('earlier').replaceChildren();
    $('bar').replaceChildren();
    $('ops').innerHTML = '<li class="quiet">Measured after a few steps.</li>';
    $('files-status').textContent = '';
}

/* ---- The worker's messages ---- */

const hears = {
    loaded(m) {
        module = m;
        Prover.variant = m.variant;
        Prover.gpu = !!m.gpu;
        Prover.know();
        $('device').textContent = m.gpu ? 'GPU' : m.threads > 1 ? `${m.threads} threads` : '1 thread';
        const relaxed = m.variant.startsWith('relaxed');
        $('device-means').textContent = m.gpu ? m.summary.split(' by ')[0] : m.fused ? 'CPU: SIMD with FMA' : 'CPU: SIMD without FMA';
        $('bits-how').textContent = m.gpu
            ? 'A GPU adds in another order than a processor, so its last bits are its own: the command, which trains on a processor, prints another hash.'
            : 'The command trains the same model on your own machine and prints the same hash.';
        $('build').textContent = `This module: ${m.variant}.`;
        if (!m.fused && !m.gpu) {
            note('fma', relaxed
                ? 'This processor does not fuse multiplication and addition, so the last bits differ from those of other machines.'
                : 'This browser has no relaxed SIMD, so there is no fused multiply-add: it is slower, and the last bits differ from those of other machines.');
            $('bits-how').textContent = 'Here there is no fused multiply-add, so the last bits, and with them the hash, differ from the one that the command prints.';
        }
    },
    empty() {
        start();
    },
    resumed() {
        say(`Continues after step ${chart.losses.length}, as you left it.`);
        if (!state.over) go();
    },
    begun(m) {
        clearRun();
        current = {settings: m.settings, name: m.name, began: m.step};
        shown = m.settings;
        state.begun = true;
        chart.clear(m.settings.steps);
        for (const loss of m.losses) chart.add(loss);
        for (const [step, loss] of m.validations) chart.validation(step, loss);
        if (!texts.has(m.name)) addText(m.name, m.text, m.name, m.prompt);
        showSettings(m.settings, m.name);
        if (m.parameters) $('lede-size').textContent = `A language model of ${(m.parameters / 1e6).toFixed(m.parameters < 1e6 ? 2 : 1)} million numbers`;
        $('memory').textContent = bytesText(m.memory);
        if (m.losses.length) latest = {hash: m.hash, memory: m.memory};
        state.over = m.step >= m.settings.steps;
        $('left').textContent = `of ${m.settings.steps}`;
        beginTwin(m.settings, m.text);
        followTwin();
        controls();
        redraw();
    },
    step(m) {
        chart.add(m.loss);
        followTwin();
        if (m.validation !== undefined) chart.validation(m.step, m.validation);
        recent.push([m.at, m.step]);
        if (recent.length > 9) recent.shift();
        latest = m;
        if (m.step === 1) controls();
        redraw();
    },
    sample: showSample,
    profile: (m) => showProfile(m.rows),
    state(m) {
        state.running = m.running;
        state.over = !!m.over;
        if (m.running) say('Training');
        else if (m.over) say(`Done: all ${chart.losses.length} steps are taken.`);
        else if (state.begun) say(state.hidden ? 'Paused while the tab is hidden' : 'Paused');
        if (!m.running) recent.length = 0;
        controls();
    },
    saved(m) {
        $('files-status').textContent = `Saved in this browser at step ${m.step}, ${bytesText(m.bytes)}.`;
    },
    exported(m) {
        download(m.name, m.bytes);
        $('files-status').textContent = m.name.endsWith('.zip')
            ? `Exported ${m.name}, ${bytesText(m.bytes.length)}. To continue natively: unzip -d run ${m.name} && vjp train run/text.txt --resume --out run`
            : `Exported ${m.name}, ${bytesText(m.bytes.length)}.`;
    },
    imported(m) {
        say(`${m.file} was read: it continues after step ${chart.losses.length}.`);
        $('files-status').textContent = `Imported ${m.file}.`;
    },
    note: (m) => note(m.id, m.sentence),
    failed(m) {
        if (m.during === 'load' && asked === 'gpu') return withoutGpu(m.sentence);
        alertWith(m.sentence);
        say(m.during === 'load' ? 'The module could not be loaded' : 'Stopped');
        Prover.know();
        controls();
    },
};

function download(name, bytes) {
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([bytes]));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* ---- What the reader does ---- */

function load(fresh) {
    if (worker) worker.terminate();
    module = null;
    asked = chosen();
    const gpu = asked === 'gpu';
    localStorage.setItem('device', asked);
    // A module without threads shares no memory with the worker of the GPU.
    const variant = gpu && !Prover.variant?.endsWith('-threads') ? undefined : Prover.variant;
    worker = new Worker('worker.js', {type: 'module'});
    worker.onmessage = ({data}) => hears[data.kind](data);
    worker.onerror = (event) => hears.failed({sentence: event.message || 'the worker could not be loaded', during: 'load'});
    worker.postMessage({kind: 'load', threads: gpu ? 1 : Number(asked), variant, gpu, fresh});
}

/* The browser offered a GPU that cannot be opened. */
function withoutGpu(sentence) {
    $('set-device').querySelector('[value=gpu]').disabled = true;
    $('set-device').selectedIndex = 0;
    note('gpu', `The GPU is not used: ${sentence} It trains on the processor.`);
    load(false);
}

function begin() {
    if (!$('settings').reportValidity()) return false;
    const name = $('set-text').value;
    alertWith('');
    const {bytes, prompt} = texts.get(name);
    if (module.gpu) say('The GPU compiles its shaders');
    worker.postMessage({kind: 'begin', settings: readSettings(), text: bytes, name, prompt});
    return true;
}

/* Trains, unless the tab is hidden: then it waits until it is seen. */
function go() {
    if (document.hidden) {
        state.hidden = true;
        return say('Waiting for the tab to be seen');
    }
    alertWith('');
    worker.postMessage({kind: 'run'});
}

function start() {
    if (asked !== chosen()) return load(true);
    if (!state.begun && !begin()) return;
    go();
}

function reset() {
    worker.postMessage({kind: 'reset'});
    clearRun();
    alertWith('');
    say('Ready: change the settings, then start.');
    controls();
}

async function take(file) {
    if (!module) return alertWith(`${file.name} was not read: the module is still being loaded.`);
    const bytes = new Uint8Array(await file.arrayBuffer());
    if (/\.(zip|safetensors)$/i.test(file.name)) {
        const textName = $('set-text').value, {bytes: text, prompt} = texts.get(textName);
        say(`Reading ${file.name}`);
        alertWith('');
        worker.postMessage({kind: 'pause'});
        return worker.postMessage({kind: 'import', file: file.name, bytes, settings: readSettings(), text, name: textName, prompt});
    }
    if (bytes.length < 1000) return alertWith(`${file.name} has ${bytes.length} bytes; a text to train on needs at least 1000.`);
    if (bytes.includes(0)) return alertWith(`${file.name} has zero bytes in it: it is no text.`);
    addText(file.name, bytes);
    reset();
    $('set-text').value = file.name;
    start();
}

function listen() {
    $('start').addEventListener('click', () => (state.running ? worker.postMessage({kind: 'pause'}) : start()));
    $('step').addEventListener('click', () => {
        if (!state.begun && !begin()) return;
        worker.postMessage({kind: 'step'});
    });
    $('reset').addEventListener('click', reset);
    $('settings').addEventListener('submit', (event) => {
        event.preventDefault();
        if (!state.begun) start();
    });
    $('set-size').addEventListener('change', () => {
        const {context, batch} = sizeOf($('set-size').value) || shown;
        showSettings({context, batch}, $('set-text').value);
    });
    for (const id of ['open', 'import'])
        $(id).addEventListener('change', (event) => {
            const [file] = event.target.files;
            event.target.value = '';
            if (file) take(file);
        });
    $('copy').addEventListener('click', async () => {
        try {
            await navigator.clipboard.writeText($('command').textContent);
            $('copy').textContent = 'Copied';
        } catch { // not allowed: it is selected, for the reader to copy
            getSelection().selectAllChildren($('command'));
        }
        setTimeout(() => ($('copy').textContent = 'Copy the command'), 1500);
    });
    $('save-text').addEventListener('click', () => {
        const name = current ? current.name : $('set-text').value;
        if (texts.has(name)) download(name, texts.get(name).bytes);
    });
    $('export').addEventListener('click', () => worker.postMessage({kind: 'export'}));
    $('export-weights').addEventListener('click', () => worker.postMessage({kind: 'export', weights: true}));
    $('forget').addEventListener('click', reset);

    let depth = 0;
    addEventListener('dragenter', (event) => {
        event.preventDefault();
        depth++;
        $('drop').hidden = false;
    });
    addEventListener('dragover', (event) => event.preventDefault());
    addEventListener('dragleave', () => ($('drop').hidden = --depth > 0));
    addEventListener('drop', (event) => {
        event.preventDefault();
        depth = 0;
        $('drop').hidden = true;
        if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
    document.addEventListener('visibilitychange', () => {
        if (document.hidden && state.running) {
            state.hidden = true;
            worker.postMessage({kind: 'pause'});
        } else if (!document.hidden && state.hidden) {
            state.hidden = false;
            if (module && state.begun) go();
        }
    });
    addEventListener('pagehide', () => worker && worker.postMessage({kind: 'pause'}));
}

/* ---- Begin ---- */

/* For tests and for the curious, in the console. */
window.vjpPage = {losses: () => chart.losses, settings: () => current && current.settings, began: () => current && current.began};

fillSettings();
listen();
controls();
const built = TEXTS.map(async ({name, label, prompt}) => {
    const answer = await fetch(name);
    if (!answer.ok) throw new Error(`${name} could not be loaded (${answer.status})`);
    addText(name, new Uint8Array(await answer.arrayBuffer()), label, prompt);
});
const offered = offerGpu();
Promise.all([...built, localStorage.getItem('device') === 'gpu' && offered]).then(() => load(false), (error) => hears.failed({sentence: error.message, during: 'load'}));

const pages = fetch('ops.json').then((answer) => answer.json());
new Prove();
new Gradient(pages);
