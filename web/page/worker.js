// SPDX-License-Identifier: MIT
// The worker that trains. It owns the module, the trainer and the saved run, and answers the page's messages
// ({kind, ...}) with messages of its own. Between two steps it lets messages in: pause, step and the rest take effect
// after the step that is computed.

import * as vjp from './vjp.js';
import {Store} from './store.js';

const SAVE_MS = 10000, SAMPLE_MS = 2500, PROFILE_MS = 4000, SPEED_STEPS = 8;
const SAMPLE = {tokens: 200, temperature: 0.6};

let module = null, store = null, trainer = null, run = null;
let running = false, looping = false;
const due = {sample: 0, profile: 0, save: 0};

const post = (kind, message = {}, transfer = []) => postMessage({kind, ...message}, transfer);

/* A turn of the event loop without the 4 ms that nested timers wait. */
const channel = new MessageChannel();
const turn = () => new Promise((resolve) => {
    channel.port1.onmessage = resolve;
    channel.port2.postMessage(0);
});

/* ---- A run: {settings, text, name, losses, validations} and the trainer ---- */

/* Validations are at steps that the settings alone decide: about 40 in a run, more of them at the beginning. */
function validates(step, steps) {
    const every = Math.max(10, Math.round(steps / 40));
    return step % every === 0 || step === steps || (step < every && step % 10 === 0);
}

function attach(made, state) {
    if (trainer) trainer.close();
    trainer = made;
    run = state;
    due.sample = 0;
    due.profile = performance.now() + 1000;
    due.save = performance.now() + SAVE_MS;
    post('begun', {
        settings: run.settings, name: run.name, parameters: trainer.parameters, step: trainer.stepCount,
        losses: run.losses, validations: run.validations, hash: hash(), memory: module.memory(),
    });
}

const hash = () => (trainer.stepCount ? trainer.lossHash() : '');

function begin({settings, text, name}) {
    const made = module.trainer({...settings, text});
    attach(made, {settings, name, text, losses: [], validations: []});
}

function resume({state, files}) {
    const text = files.get('text');
    const checkpoint = new Map([...files].filter(([name]) => name !== 'text'));
    const made = module.resume(checkpoint, {text, threads: module.threads});
    attach(made, {...state, text});
}

function takeStep() {
    const row = trainer.step();
    run.losses.push(row.loss);
    let validation = null;
    if (validates(row.step, run.settings.steps)) {
        validation = trainer.validate();
        run.validations.push([row.step, validation]);
    }
    post('step', {...row, validation, hash: hash(), memory: module.memory()});
}

function takeSample() {
    const began = performance.now();
    const prompt = run.settings.prompt || '';
    const text = trainer.sample({prompt, ...SAMPLE});
    post('sample', {step: trainer.stepCount, prompt, text});
    // Sampling takes at most a quarter of the time.
    due.sample = performance.now() + Math.max(SAMPLE_MS, 3 * (performance.now() - began));
}

function takeProfile() {
    post('profile', {rows: trainer.profile()});
    due.profile = performance.now() + PROFILE_MS;
}

function save() {
    if (!store || !trainer || !trainer.stepCount) return;
    try {
        const files = trainer.save();
        const {settings, name, losses, validations} = run;
        const bytes = store.save({settings, name, losses, validations}, new Map([['text', run.text], ...files]));
        post('saved', {bytes, step: trainer.stepCount});
    } catch (error) {
        post('note', {id: 'save', sentence: error.message});
    }
    due.save = performance.now() + SAVE_MS;
}

const over = () => trainer.stepCount >= run.settings.steps;

async function loop() {
    if (looping) return;
    looping = true;
    post('state', {running: true});
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

/* ---- Messages ---- */

const handlers = {
    async load({threads, fresh}) {
        module = await vjp.load({threads});
        post('loaded', {variant: module.variant, fused: module.fused, threads: module.threads});
        try {
            store = await Store.open();
        } catch (error) {
            post('note', {id: 'store', sentence: error.message});
        }
        const saved = store && !fresh ? store.load() : null;
        if (saved) {
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
        const files = trainer.save();
        if (weights) {
            const [, bytes] = [...files].find(([name]) => name.endsWith('model.safetensors'));
            return post('exported', {bytes, name: `vjp-step-${trainer.stepCount}.safetensors`});
        }
        files.set(run.name, run.text);
        const {settings, name, losses, validations} = run;
        files.set('page.json', new TextEncoder().encode(JSON.stringify({settings, name, losses, validations})));
        const bytes = vjp.zip(files);
        post('exported', {bytes, name: `vjp-step-${trainer.stepCount}.zip`}, [bytes.buffer]);
    },
    import({bytes, name, settings, text, textName}) {
        if (name.endsWith('.safetensors')) {
            const made = module.trainer({...settings, text, weights: bytes});
            return attach(made, {settings, name: textName, text, losses: [], validations: []});
        }
        const files = vjp.unzip(bytes);
        const page = files.get('page.json');
        if (!page) throw new Error(`${name} has no page.json: it was not exported by this page`);
        const state = JSON.parse(new TextDecoder().decode(page));
        const data = files.get(state.name);
        if (!data) throw new Error(`${name} has no ${state.name}, the text of the run`);
        files.delete('page.json');
        files.delete(state.name);
        resume({state, files: new Map([['text', data], ...files])});
    },
    save,
};

onmessage = async ({data}) => {
    try {
        await handlers[data.kind](data);
    } catch (error) {
        post('failed', {sentence: error.message, during: data.kind});
    }
};
