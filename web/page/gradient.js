// SPDX-License-Identifier: MIT
// "A gradient you can see": the inputs of an op as numbers to edit, and beside each gradient of the backward pass the
// central differences of the forward pass. The calls are made by prover.js; the text is the op's page in docs/ops.

import {prose} from './math.js';
import {Prover} from './prove.js';

const $ = (id) => document.getElementById(id);
const MAX_ELEMENTS = 256, STEP = 1e-5;

const CHANNELS = ['channels_first', 'channels_last'];
const REDUCTION = ['mean', 'sum'];
/*
 * What each op starts with: shapes of inputs (an array: random numbers; {shape, numbers}: these; {shape, below}: whole
 * numbers) and the attributes that can be changed (a number, a boolean, or the choices). `derived` are attributes that
 * only the backward pass needs, because it does not see the input they follow from.
 */
const OPS = {
    rms_norm: {inputs: {x: [2, 4], gamma: [4], beta: [4]}, attributes: {eps: 1e-6}},
    layer_norm: {inputs: {x: [2, 4], gamma: [4], beta: [4]}, attributes: {eps: 1e-5}},
    group_norm: {inputs: {x: [1, 4, 3], gamma: [4], beta: [4]}, attributes: {groups: 2, layout: CHANNELS}},
    swiglu: {inputs: {gate: [2, 4], up: [2, 4]}},
    linear: {
        inputs: {a: [2, 3], b: [3, 4], bias: [4]},
        attributes: {activation: ['gelu_tanh', 'none', 'relu', 'gelu_erf', 'silu', 'sigmoid', 'tanh'], transpose_b: false},
    },
    attention: {inputs: {q: [1, 4, 2, 2], k: [1, 4, 1, 2], v: [1, 4, 1, 2]}, attributes: {causal: true, scale: 0}},
    rope: {
        inputs: {
            x: [3, 1, 4],
            cosine: {shape: [3, 2], numbers: [1, 1, 0.5403, 0.995, -0.4161, 0.9801]},
            sine: {shape: [3, 2], numbers: [0, 0, 0.8415, 0.0998, 0.9093, 0.1987]},
        },
        attributes: {pairing: ['half', 'interleaved']},
    },
    cross_entropy: {
        inputs: {logits: [3, 4], target: {shape: [3], below: 4}},
        attributes: {label_smoothing: 0.1, reduction: REDUCTION},
    },
    linear_cross_entropy: {
        inputs: {x: [3, 2], weight: [4, 2], target: {shape: [3], below: 4}},
        attributes: {label_smoothing: 0, reduction: REDUCTION},
    },
    conv2d: {
        inputs: {x: [1, 1, 4, 4], weight: [1, 1, 3, 3], bias: [1]},
        attributes: {stride_h: 1, stride_w: 1, padding_h: 1, padding_w: 1},
    },
    maxpool2d: {inputs: {x: [1, 1, 4, 4]}, attributes: {kernel_h: 2, kernel_w: 2}},
    gather: {
        inputs: {table: [4, 3], index: {shape: [5], below: 4}},
        derived: (inputs) => ({rows: inputs.table.shape[0]}),
    },
    cumsum: {inputs: {x: [2, 5]}, attributes: {exclusive: false, reverse: false}},
    mean: {inputs: {x: [3, 4]}, attributes: {axis: 0}},
    add: {inputs: {a: [2, 4], b: [4]}, derived: (inputs) => ({b_axes: inputs.b.shape.length})},
    mul: {inputs: {a: [2, 4], b: [4]}, derived: (inputs) => ({b_axes: inputs.b.shape.length})},
    scale: {inputs: {x: [2, 4]}, attributes: {factor: 0.7}},
    dropout: {inputs: {x: [2, 4], counter: {shape: [2], numbers: [1, 7], whole: true}}, attributes: {p: 0.3}},
};

const count = (shape) => shape.reduce((product, n) => product * n, 1);
const made = (tag, text = '', className = '') => Object.assign(document.createElement(tag), {textContent: text, className});

/* Numbers between -2 and 2 that are the same on every visit. */
function random(seed) {
    let state = (seed * 2654435761) >>> 0;
    return () => {
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
        return Math.round((state / 2 ** 32 - 0.5) * 400) / 100;
    };
}

const rounded = (v) => {
    const text = Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-4) ? v.toExponential(2) : v.toFixed(4);
    return text.replace('-', '−');
};

export class Gradient {
    constructor(pages) {
        Object.assign(this, {prover: new Prover(), pages, seed: 1, id: 0, timer: 0});
        this.prover.on('gradient', (m) => m.id === this.id && this.show(m));
        this.prover.on('failed', (m) => m.id === this.id && this.failed(m.sentence));
        for (const name of Object.keys(OPS)) {
            $('op').add(new Option(name));
            $('break-op').add(new Option(name));
        }
        $('op').addEventListener('change', () => this.choose());
        $('random').addEventListener('click', () => {
            this.seed++;
            this.choose();
        });
        $('op-inputs').addEventListener('input', (event) => this.edited(event.target));
        $('op-inputs').addEventListener('submit', (event) => event.preventDefault());
        // The worker is started when this part comes into view, so that the model has the processor to itself first.
        new IntersectionObserver((entries, observer) => {
            if (!entries.some((e) => e.isIntersecting)) return;
            observer.disconnect();
            this.choose();
        }, {rootMargin: '200px'}).observe($('gradient'));
    }
    async choose() {
        this.op = $('op').value;
        this.seeds = {};
        const {inputs, attributes = {}} = OPS[this.op], draw = random(this.seed + this.op.length);
        const fields = [];
        for (const [name, given] of Object.entries(inputs)) {
            const shape = given.shape || given, whole = !!(given.below || given.whole);
            const numbers = given.numbers || Array.from({length: count(shape)}, () =>
                given.below ? Math.floor(((draw() + 2) / 4) * given.below) % given.below : draw());
            fields.push(this.tensor(name, shape, numbers, {whole, below: given.below || 0}));
        }
        for (const [name, value] of Object.entries(attributes)) fields.push(this.attribute(name, value));
        $('op-inputs').replaceChildren(...fields);
        $('op-results').replaceChildren();
        $('op-prose').innerHTML = '';
        this.run();
        const pages = await this.pages;
        $('op-prose').innerHTML = prose(pages[this.op]);
    }
    tensor(name, shape, numbers, {whole = false, below = 0, seed = false} = {}) {
        const box = made('div', '', 'tensor'), head = made('div', '', 'head');
        Object.assign(box.dataset, {name, whole: whole ? 1 : '', below, seed: seed ? 1 : ''});
        const label = made('label', '');
        label.append(made('code', name), whole ? ' whole numbers' : seed ? ' gradient that comes in' : '');
        const text = document.createElement('textarea');
        text.spellcheck = false;
        text.id = `numbers-${name}`;
        label.htmlFor = text.id;
        head.append(label);
        if (!seed) {
            const field = made('input', '', 'shape');
            field.value = shape.join(' × ');
            field.setAttribute('aria-label', `shape of ${name}`);
            head.append(field);
        }
        box.append(head, text);
        this.write(box, shape, numbers);
        return box;
    }
    write(box, shape, numbers) {
        const width = shape.length ? shape.at(-1) : 1, lines = [];
        for (let i = 0; i < numbers.length; i += width || 1) lines.push(numbers.slice(i, i + width).join('  '));
        const text = box.querySelector('textarea');
        text.value = lines.join('\n');
        text.rows = Math.min(Math.max(lines.length, 1), 6);
        box.dataset.shape = JSON.stringify(shape);
    }
    attribute(name, value) {
        const box = made('div', '', 'tensor attribute'), label = made('label', '');
        label.append(made('code', name));
        let field;
        if (Array.isArray(value) || typeof value === 'boolean') {
            field = document.createElement('select');
            for (const choice of Array.isArray(value) ? value : ['false', 'true']) field.add(new Option(choice));
            if (typeof value === 'boolean') field.value = String(value);
        } else {
            field = Object.assign(document.createElement('input'), {type: 'number', step: 'any', value});
        }
        Object.assign(field.dataset, {attribute: name, type: Array.isArray(value) ? 'choice' : typeof value});
        label.append(field);
        box.append(label);
        return box;
    }
    edited(field) {
        const box = field.closest('.tensor');
        if (field.classList.contains('shape')) {
            const shape = field.value.split(/[^0-9]+/).filter((n) => n).map(Number);
            if (!shape.length || !count(shape)) return;
            if (count(shape) > MAX_ELEMENTS) return this.say(`${box.dataset.name} would have ${count(shape)} numbers; at most ${MAX_ELEMENTS} fit here.`, true);
            const draw = random(this.seed + count(shape)), below = Number(box.dataset.below);
            const numbers = Array.from({length: count(shape)}, () => below ? Math.floor(((draw() + 2) / 4) * below) % below : draw());
            this.write(box, shape, numbers);
        }
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.run(), 250);
    }
    say(sentence, bad = false) {
        $('op-status').className = bad ? 'bad' : '';
        $('op-status').textContent = sentence;
    }
    /* {inputs, seeds, attributes} as they stand in the form; throws with a sentence. */
    read() {
        const inputs = {}, seeds = {}, attributes = {};
        for (const box of $('op-inputs').querySelectorAll('.tensor:not(.attribute)')) {
            const {name} = box.dataset, shape = JSON.parse(box.dataset.shape);
            const words = box.querySelector('textarea').value.replaceAll('−', '-').split(/[\s,;]+/).filter((w) => w);
            const numbers = words.map(Number), wrong = words.find((w, i) => Number.isNaN(numbers[i]));
            if (wrong !== undefined) throw new Error(`${name}: "${wrong}" is no number.`);
            if (numbers.length !== count(shape))
                throw new Error(`${name} has ${numbers.length} numbers; its shape ${shape.join(' × ') || 'of one number'} needs ${count(shape)}.`);
            const whole = !!box.dataset.whole;
            const data = whole ? Int32Array.from(numbers) : Float64Array.from(numbers);
            (box.dataset.seed ? seeds : inputs)[box.dataset.seed ? name.slice(1) : name] = {data, shape, dtype: whole ? 'i32' : 'f64'};
        }
        for (const field of $('op-inputs').querySelectorAll('[data-attribute]')) {
            const {attribute, type} = field.dataset;
            attributes[attribute] = type === 'choice' ? field.value : type === 'boolean' ? field.value === 'true' : Number(field.value);
        }
        return {inputs, seeds, attributes};
    }
    async run() {
        const id = ++this.id;
        try {
            const {inputs, seeds, attributes} = this.read();
            const {derived = () => ({})} = OPS[this.op];
            if (!this.prover.ready) this.say('Loading a module for single ops');
            await this.prover.start();
            this.prover.post({kind: 'gradient', id, op: this.op, inputs, seeds, attributes, derived: derived(inputs), step: STEP});
        } catch (error) {
            if (id === this.id) this.failed(error.message);
        }
    }
    failed(sentence) {
        this.say(sentence, true);
        $('op-results').replaceChildren();
    }
    show({forward, backward, differences, seeds}) {
        for (const [name, seed] of Object.entries(seeds)) {
            const old = $('op-inputs').querySelector(`[data-name="d${name}"]`);
            if (old) this.write(old, seed.shape, [...seed.data]);
            else $('op-inputs').append(this.tensor(`d${name}`, seed.shape, [...seed.data], {seed: true}));
        }
        const results = [];
        const first = made('div', '', 'result');
        first.append(made('h4', 'Forward'));
        for (const [name, t] of Object.entries(forward)) first.append(this.grid(name, t.data, t.shape));
        results.push(first);
        let worst = 0;
        for (const [name, d] of Object.entries(differences)) {
            const {data, shape} = backward[`d${name}`], box = made('div', '', 'result');
            let largest = 0, scale = 0;
            for (let i = 0; i < d.length; i++) {
                largest = Math.max(largest, Math.abs(d[i] - data[i]));
                scale = Math.max(scale, Math.abs(d[i]));
            }
            worst = Math.max(worst, largest / (scale || 1));
            box.append(made('h4', `Gradient of ${name}`), this.grid(`d${name}: backward pass, f32`, data, shape),
                this.grid('central differences, f64', d, shape));
            box.append(made('p', `largest difference ${largest.toExponential(1)}`, 'small'));
            results.push(box);
        }
        $('op-results').replaceChildren(...results);
        this.say(`The backward pass and the central differences agree to ${worst.toExponential(1)} of the largest gradient.`);
        $('op-status').className = worst < 1e-4 ? 'good' : 'bad';
        if (!(worst < 1e-4)) this.say(`They differ by ${worst.toExponential(1)} of the largest gradient. Where a function has a corner or a jump between the two points, central differences are wrong.`, true);
    }
    /* Numbers as a table whose cells are shaded by size. */
    grid(caption, data, shape) {
        const figure = made('figure'), box = made('div', '', 'grid'), table = made('table');
        const values = Array.from(data, Number), width = shape.length ? shape.at(-1) : 1;
        const plane = shape.length > 1 ? shape.at(-2) : 1, largest = Math.max(...values.map(Math.abs), 1e-30);
        const whole = !(data instanceof Float32Array || data instanceof Float64Array);
        for (let i = 0; i < values.length; i += width) {
            const row = table.insertRow();
            if (i && (i / width) % plane === 0) row.className = 'gap';
            for (const v of values.slice(i, i + width)) {
                const cell = row.insertCell(), share = Math.round((Math.abs(v) / largest) * 45);
                cell.textContent = whole ? String(v) : rounded(v);
                cell.style.background = `color-mix(in srgb, var(${v < 0 ? '--validation' : '--train'}) ${share}%, transparent)`;
            }
        }
        box.append(table);
        box.tabIndex = 0;
        box.setAttribute('role', 'region');
        box.setAttribute('aria-label', caption);
        figure.append(made('figcaption', caption), box);
        return figure;
    }
}
