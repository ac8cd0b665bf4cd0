// SPDX-License-Identifier: MIT
// The tests of vjp.js on WebGPU, in a worker: single calls, refusals, a check of each op, and of each op when it is broken,
// and training steps beside the processor's. Posts what it found; test_gpu.py judges it.
import {load} from './vjp.js';
import {expect, throws} from './expect.js';

const SETTINGS = {preset: 'tiny', dim: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 64, context: 16, batch: 2, warmup: 5, seed: 7,
                  validate_every: 0};

function calls(gpu, ref) {
  const x = {data: Float32Array.of(1, -2, 3, 4, 5, -6), shape: [2, 3]};
  const {y} = gpu.call('scale', 'forward', {x}, {factor: 0.5});
  expect(y.data.join() === '0.5,-1,1.5,2,2.5,-3' && y.shape.join() === '2,3', `scale: ${y.data}`);
  const sum = gpu.call('scale', 'forward', {x, y}, {factor: 1}).y;
  expect(sum.data.join() === '1.5,-3,4.5,6,7.5,-9', `scale, added to: ${sum.data}`);
  const dx = device => device.call('add', 'backward', {dy: x}, {}, {outputs: ['da']}).da.data.join();
  expect(dx(gpu) === dx(ref), `add: ${dx(gpu)}`);
  throws(() => gpu.call('scale', 'forward', {x: {data: new Float64Array(2), shape: [2]}}), 'f64');
}

// Addresses are above the module's memory, those of two buffers are apart, and those that were freed are used again.
function memory(v, gpu) {
  const bytes = 1 << 20;
  const allocate = () => v.with([new Uint32Array(1)], place => {
    expect(v.c.vjp_alloc(gpu.at, bytes, place) === 0, v.text(v.c.vjp_web_device_error(gpu.at)));
    return new Uint32Array(v.bytes(place, 4).slice().buffer)[0];
  });
  const first = allocate(), second = allocate();
  expect(first >= 2 ** 31 && Math.abs(first - second) >= bytes, `buffers at ${first} and ${second}`);
  v.c.vjp_free(gpu.at, first);
  const third = allocate();
  expect(third === first, `${first} was freed, and the next buffer is at ${third}`);
  v.c.vjp_free(gpu.at, second);
  v.c.vjp_free(gpu.at, third);
}

function training(v, text, device, steps) {
  const t = v.trainer({...SETTINGS, steps, text, device}), rows = [];
  const waits = [];
  while (t.stepCount < steps) {
    const before = Number(t.property('waits'));
    rows.push(t.step());
    waits.push(Number(t.property('waits')) - before);
    if (t.stepCount >= steps - 2) t.profile(); // the next step waits for each op; the last was run before
  }
  const {device: summary} = t.describe(), files = t.save(), ops = t.profile().map(({op, pass}) => `${op} ${pass}`);
  t.close();
  return {ops, losses: rows.map(row => row.loss), ms: rows.map(row => row.ms), waits, summary, files: [...files.keys()]};
}

// `brief`: one case of each op, whose shaders are then there for the broken op.
function proof(v, gpu, op, dtype, brief) {
  const failures = [];
  const options = {device: gpu, dtype, brief, onRow: row => { if (!row.ok) failures.push(row); }};
  const {rows, failed} = v.check({...options, ops: [op]});
  return {rows, failed, failures: failures.slice(0, 5), broken: v.checkBroken(op, {...options, brief: true, onRow: undefined}).failed};
}

onmessage = async ({data: {ops, dtypes, quick, steps}}) => {
  try {
    const seconds = {}, found = {};
    const timed = async (name, work) => {
      const begin = performance.now();
      found[name] = await work();
      seconds[name] = Math.round(performance.now() - begin) / 1e3;
    };
    const plain = await load({threads: 1});
    throws(() => plain.open('webgpu'), 'webgpu');
    plain.close();
    const v = await load({threads: 1, gpu: true}), gpu = v.open('webgpu'), ref = v.open('ref');
    await timed('calls', () => calls(gpu, ref));
    await timed('memory', () => memory(v, gpu));
    const names = ops === 'all' ? v.ops().map(({name}) => name) : ops ? ops.split(',') : [];
    for (const dtype of dtypes.split(','))
      for (const op of names) await timed(`${op} ${dtype}`, () => proof(v, gpu, op, dtype, !quick));
    gpu.close();
    ref.close();
    if (Number(steps)) {
      const text = new Uint8Array(await (await fetch('/text.txt')).arrayBuffer());
      await timed('cpu', () => training(v, text, 'cpu', Number(steps)));
      await timed('webgpu', () => training(v, text, 'webgpu', Number(steps)));
    }
    postMessage({found, seconds, ops: v.ops().length});
  } catch (error) {
    postMessage({error: `${error.message}\n${error.stack}`});
  }
};
