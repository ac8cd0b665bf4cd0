// SPDX-License-Identifier: MIT
// The worker that trains. It owns the module, the trainer and the saved run, and answers the page's messages
// ({kind, ...}) with messages of its own. Between two steps it lets messages in: pause, step and the rest take effect
// after the step that is computed.

import * as vjp from './vjp.js';
import {Store} from './store.js';

const SAVE_MS = 10000, SAMPLE_MS = 2500, PROFILE_MS = 4000, TIMED_STEPS = 20; // of which one is timed on a GPU
const SAMPLE = {tokens: 200, temperature: 0.6};

let module = null, store = null, trainer = null, run = null, device = 'cpu';
let running = false, looping = false;
const due = {sample: 0, profile: 0, save: 0};
let stepMs = 0; // of the last step

const post = (kind, message = {}, transfer = []) => postMessage({kind, ...message}, transfer);

/* A turn of the event loop without the 4 ms that nested timers wait. */
const channel = new MessageChannel();
const turn = () => new Promise((resolve) => {
    channel.port1.onmessage = resolve;
    channel.port2.postMessage(0);
});

/* ---- A run: {name, prompt, text} of its text, its settings, and the trainer ---- */

/* Those of trainer.json and the numbers of the model. */
function settingsOf({settings, dim, layers, heads, kv_heads, ffn}) {
    return {...settings, lr: settings.rate, dim, layers, heads, kv_heads, ffn};
}

function attach(made, about) {
    if (trainer) trainer.close();
    trainer = made;
    const described = trainer.describe(), {parameters, step} = described, rows = trainer.rows();
    run = {...about, settings: settingsOf(described)};
    due.sample = performance.now() + 1000;
    due.profile = performance.now() + 1000;
    due.save = performance.now() + SAVE_MS;
    post('begun', {
        settings: run.settings, name: run.name, prompt: run.prompt, text: run.text, parameters, step,
        losses: rows.map((row) => row.loss),
        validations: rows.filter((row) => row.validation !== undefined).map((row) => [row.step, row.validation]),
        hash: hash(), memory: module.memory().bytes,
    });
}

const hash = () => (trainer.stepCount ? trainer.lossHash() : '');

function begin({settings, text, name, prompt, weights}) {
    attach(module.trainer({...settings, text, weights, device}), {name, prompt, text, device});
}

/* From the files of a run: those that this page saved, or a folder of `vjp train` with its text as text.txt. */
function resume(files) {
    const text = files.get('text.txt'), page = files.get('page.json');
    const about = page ? JSON.parse(new TextDecoder().decode(page)) : {name: 'text.txt', prompt: ''};
    const folder = new Map([...files].filter(([name]) => name !== 'page.json'));
    // A run that began on another device, or without fused multiply-add, continues all the same.
    const other = (about.device ?? 'cpu') !== device;
    const allowOtherBits = !module.fused || device !== 'cpu' || other;
    if (other) post('note', {id: 'other', sentence: 'This run was trained on the GPU and on the processor, so its hash is neither\'s.'});
    attach(module.resume(folder, {text, device, allowOtherBits}), {...about, device: other ? 'both' : device, text});
}

function filesOfRun() {
    const {name, prompt, device} = run;
    return trainer.save().set('page.json', new TextEncoder().encode(JSON.stringify({name, prompt, device})));
}

function takeStep() {
    const row = trainer.step();
    stepMs = row.ms;
    post('step', {...row, at: performance.now(), hash: hash(), memory: module.memory().bytes});
}

function takeSample() {
    const began = performance.now(), {prompt} = run;
    const text = trainer.sample({prompt, ...SAMPLE});
    post('sample', {step: trainer.stepCount, prompt, text});
    // Sampling takes at most a quarter of the time.
    due.sample = performance.now() + Math.max(SAMPLE_MS, 3 * (performance.now() - began));
}

function takeProfile() {
    post('profile', {rows: trainer.profile()});
    // On a GPU the next step waits for every op, so few steps are timed.
    due.profile = performance.now() + Math.max(PROFILE_MS, device === 'cpu' ? 0 : TIMED_STEPS * stepMs);
}

function save() {
    if (!store || !trainer || !trainer.stepCount) return;
    try {
        post('saved', {bytes: store.save(filesOfRun()), step: trainer.stepCount});
    } catch (error) {
        post('note', {id: 'save', sentence: error.message});
    }
    due.save = performance.now() + SAVE_MS;
}

const over = () => trainer.stepCount >= run.settings.steps;

async function loop() {
    post('state', {running: true});
    if (looping) return; // the loop of the run before takes this one up
    looping = true;
    try {
        while (running && trainer && !over()) {
            takeStep();
            const now = performance.now();
            if (now >= due.sample || over()) takeSample();
            if (now >= due.profile || over()) takeProfile();
            if (now >= due.save) save();
            await turn();
        }
        if (trainer) save();
    } catch (error) {
        post('failed', {sentence: error.message});
    }
    running = looping = false;
    post('state', {running: false, over: !!trainer && over()});
}

/* ---- The twin ---- */

let ahead = 0;

/* Up to the step of the GPU, so that it rests when the GPU does. */
async function follow() {
    if (looping || !trainer) return;
    looping = true;
    while (trainer.stepCount < ahead) {
        post('twin', {loss: trainer.step().loss});
        await turn();
    }
    looping = false;
}

/* ---- Messages ---- */

const handlers = {
    async load({threads, variant, gpu, fresh}) {
        module = await vjp.load({threads, variant, gpu});
        device = gpu ? 'webgpu' : 'cpu';
        const opened = module.open(device), {summary} = opened;
        opened.close();
        post('loaded', {variant: module.variant, fused: module.fused, threads: module.threads, gpu, summary});
        try {
            store = await Store.open();
        } catch (error) {
            post('note', {id: 'store', sentence: error.message});
        }
        const saved = store && store.load();
        if (saved && !fresh) {
            try {
                resume(saved);
                return post('resumed', {});
            } catch (error) {
                post('note', {id: 'saved', sentence: `The saved run could not be continued: ${error.message}.`});
            }
        }
        post('empty', {});
    },
    begin,
    run() {
        running = true;
        loop();
    },
    pause() {
        running = false;
    },
    step() {
        if (running || !trainer || over()) return;
        takeStep();
        takeSample();
        takeProfile();
        save();
        post('state', {running: false, over: over()});
    },
    reset() {
        running = false;
        if (trainer) trainer.close();
        trainer = run = null;
        if (store) store.forget();
    },
    export({weights}) {
        const files = filesOfRun(), step = trainer.stepCount;
        if (weights) {
            const [, bytes] = [...files].find(([name]) => name.endsWith('/model.safetensors'));
            return post('exported', {bytes, name: `vjp-step-${step}.safetensors`});
        }
        const bytes = vjp.zip(files);
        post('exported', {bytes, name: `vjp-step-${step}.zip`}, [bytes.buffer]);
    },
    import({file, bytes, ...rest}) {
        if (file.toLowerCase().endsWith('.safetensors')) begin({...rest, weights: bytes});
        else resume(vjp.unzip(bytes));
        post('imported', {file});
        save();
    },
    save,
    /* In a worker of its own: the losses that the processor has with these settings, beside those of a GPU. */
    async twin({threads, variant, settings, text}) {
        module = await vjp.load({threads, variant});
        trainer = module.trainer({...settings, text});
        follow();
    },
    /* The GPU has taken that many steps. */
    follow({step}) {
        ahead = step;
        follow();
    },
};

onmessage = async ({data}) => {
    try {
        await handlers[data.kind](data);
    } catch (error) {
        post('failed', {sentence: error.message, during: data.kind});
    }
};
