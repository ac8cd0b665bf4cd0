// SPDX-License-Identifier: MIT
// The worker that checks: the proof of all kernels, a kernel broken on purpose, and single calls of ops. It has a
// module of its own, so that the page can end a check by ending the worker, and nothing here touches the model that is
// trained.

import * as vjp from './vjp.js';

let module = null, cpu = null, ref = null, ops = [], device = 'cpu';
const post = (kind, message = {}) => postMessage({kind, ...message});

function centralDifferences({op, attributes, inputs, grads, seeds, step}) {
    const loss = (changed) => {
        const outputs = ref.call(op, 'forward', changed, attributes);
        let sum = 0;
        for (const [name, seed] of Object.entries(seeds))
            outputs[name].data.forEach((y, i) => (sum += Number(y) * seed.data[i]));
        return sum;
    };
    const results = {};
    for (const name of grads) {
        const x = inputs[name].data, result = new Float64Array(x.length);
        for (let i = 0; i < x.length; i++) {
            const h = step * Math.max(1, Math.abs(x[i]));
            const moved = (by) => {
                const data = Float64Array.from(x);
                data[i] += by;
                return loss({...inputs, [name]: {...inputs[name], data}});
            };
            result[i] = (moved(h) - moved(-h)) / (2 * h);
        }
        results[name] = result;
    }
    return results;
}

/* f32 for the kernels of the processor, f64 for the plain loops; whole numbers stay what they are. */
const as = (Type, dtype, tensors) => Object.fromEntries(Object.entries(tensors).map(([name, t]) =>
    [name, t.dtype.startsWith('f') ? {...t, dtype, data: Type.from(t.data)} : t]));

/* The names of a pass's input tensors. */
const inputNames = (op, pass) => ops.find((o) => o.name === op).passes[pass].inputs.map((slot) => slot.name);

/* 1, -0.5, 0.25, 2, again: a gradient that a mistake in the order of elements does not leave the same. */
const usualSeed = (count) => Float64Array.from({length: count}, (_, i) => (count === 1 ? 1 : [1, -0.5, 0.25, 2][(i + (i >> 2)) % 4]));

const handlers = {
    async load({threads, variant, gpu}) {
        module = await vjp.load({threads, variant, gpu});
        device = gpu ? module.open('webgpu') : 'cpu'; // kept open, since it holds the shaders that are compiled
        cpu = module.open('cpu');
        ref = module.open('ref');
        ops = module.ops();
        post('loaded', {ops});
    },
    check({ops}) {
        const began = performance.now();
        let failed = 0;
        for (const op of ops) {
            post('checking', {op});
            const result = module.check({device, ops: [op], quick: true, onRow: (row) => post('row', {op, row})});
            failed += result.failed;
            post('checked', {op, ok: result.rows - result.failed, failed: result.failed});
        }
        post('proved', {seconds: (performance.now() - began) / 1000, failed});
    },
    break({op}) {
        post('checking', {op});
        const result = module.checkBroken(op, {device, quick: true, onRow: (row) => post('row', {op, row})});
        const ok = result.rows - result.failed;
        post('checked', {op, ok, failed: result.failed});
        post('broken', {op, ok, failed: result.failed});
    },
    /*
     * Forward and backward by the cpu in f32, and central differences of the plain loops in f64. `seeds` are the
     * gradients that come in; where one is missing or has another size, fixed numbers are taken and sent back.
     */
    gradient({id, op, attributes, derived, inputs, seeds, step}) {
        const narrow = as(Float32Array, 'f32', inputs);
        const forward = cpu.call(op, 'forward', narrow, attributes);
        const given = {}, taken = {};
        for (const name of inputNames(op, 'backward')) {
            const of = name.slice(1);
            if (narrow[name]) given[name] = narrow[name];
            else if (forward[name]) given[name] = forward[name];
            else if (name[0] === 'd' && forward[of]) {
                const {shape, data} = forward[of];
                taken[of] = seeds[of] && seeds[of].data.length === data.length ? seeds[of] : {shape, data: usualSeed(data.length)};
                given[name] = {...forward[of], data: Float32Array.from(taken[of].data)};
            }
        }
        const backward = cpu.call(op, 'backward', given, {...attributes, ...derived});
        const grads = Object.keys(inputs).filter((name) => backward['d' + name]);
        const wide = as(Float64Array, 'f64', inputs);
        const differences = centralDifferences({op, attributes, inputs: wide, grads, seeds: taken, step});
        post('gradient', {id, forward, backward, differences, seeds: taken});
    },
};

onmessage = async ({data}) => {
    try {
        await handlers[data.kind](data);
    } catch (error) {
        post('failed', {sentence: error.message, during: data.kind, id: data.id});
    }
};
