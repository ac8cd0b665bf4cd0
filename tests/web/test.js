// SPDX-License-Identifier: MIT
// The tests of vjp.js that need a browser, in a worker. Posts what it measured; test_module.py compares it with the
// program's results.
import {load, probe, unzip, zip} from './vjp.js';
import {expect, throws} from './expect.js';

const STEPS = 20, ALL_STEPS = 30; // the settings are those of test_module.py
const SETTINGS = {preset: 'tiny', dim: 64, layers: 2, heads: 4, kv_heads: 2, ffn: 160, context: 64, batch: 4,
                  steps: ALL_STEPS, warmup: 5, seed: 7, validate_every: 10};

const bytesOf = async path => new Uint8Array(await (await fetch(path)).arrayBuffer());

async function post(path, body) {
  const reply = await fetch(path, {method: 'POST', body});
  if (!reply.ok) throw new Error(`${path}: ${await reply.text()}`);
  return new Uint8Array(await reply.arrayBuffer());
}

// All hashes of bits_hash, by the module that has it.
async function bits(variant, threads) {
  let text = '';
  const v = await load({name: 'vjp_test', variant, threads, print: (part, isError) => { if (!isError) text += part; }});
  const failed = v.c.vjp_test_bits_hash(threads);
  v.close();
  expect(!failed, 'bits_hash failed');
  return text;
}

function calls(v) {
  const cpu = v.open('cpu'), ref = v.open('ref');
  const x = {data: Float32Array.of(1, 2, 3, 4, 5, 6), shape: [2, 3]};
  const sums = cpu.call('cumsum', 'forward', {x}, {reverse: true}).y;
  expect(sums.data.join() === '6,5,3,15,11,6' && sums.shape.join() === '2,3' && sums.dtype === 'f32', `cumsum: ${sums.data}`);
  const exact = ref.call('cumsum', 'forward', {x: {data: Float64Array.of(0.5, 0.25), shape: [2]}}).y;
  expect(exact.dtype === 'f64' && exact.data.join() === '0.5,0.75', `ref: ${exact.data}`);
  const gathered = cpu.call('gather', 'forward', {table: x, index: {data: Int32Array.of(1, 1), shape: [2]}});
  expect(gathered.y.data.join() === '4,5,6,4,5,6', `gather: ${gathered.y.data}`);
  const {dx, ...rest} = cpu.call('rms_norm', 'backward', {dy: x, x}, {}, {outputs: ['dx']});
  expect(dx.shape.join() === '2,3' && Object.keys(rest).length === 0, 'rms_norm: only dx was wanted');
  throws(() => cpu.call('nothing', 'forward', {}), 'there is no op "nothing"');
  throws(() => cpu.call('cumsum', 'forward', {z: x}), 'cumsum has no "z"');
  throws(() => cpu.call('cumsum', 'forward', {x}, {axis: 5}), 'axis');
  throws(() => cpu.call('cumsum', 'forward', {x}, {axis: 0.5}), 'must be an integer');
  throws(() => cpu.call('gather', 'forward', {table: x, index: Int32Array.of(9)}), '9');
  throws(() => v.open('tpu'), 'unknown device');
  expect(v.ops().length > 20 && v.ops()[0].passes.backward.outputs[0].name === 'dx', 'the table of ops');
  cpu.close();
  ref.close();
}

// The loss mean((x w)^2) of a graph, and its gradient beside the one that is known.
function graphs(v) {
  const cpu = v.open('cpu'), g = v.graph();
  const x = g.input('x', [2, 3]), w = g.parameter('w', [3, 1]);
  const y = g.op('linear', {a: x, b: w}), loss = g.op('mean', {x: g.op('mul', {a: y, b: y})}, {axes: 0});
  const [dw] = g.grad(loss, [w]);
  const p = g.compile(cpu, [loss, dw]);
  p.write(x, Float32Array.of(1, 2, 3, 4, 5, 6));
  p.write(w, Float32Array.of(1, 0, -1));
  p.run();
  const found = p.read(loss).data[0], gradient = p.read(dw).data;
  expect(found === 4 && gradient.join() === '-10,-14,-18', `graph: ${found}, ${gradient}`);
  throws(() => g.op('linear', {a: x, b: x}), 'linear');
  p.close();
  g.close();
  cpu.close();
}

async function training(v, text) {
  const t = v.trainer({...SETTINGS, text}), losses = [], rows = [];
  for (let i = 0; i < STEPS; i++) {
    rows.push(t.step());
    losses.push(rows[i].loss);
  }
  const hash = t.lossHash(), validation = t.validate(), files = t.save(), profile = t.profile();
  const sample = t.sample({prompt: 'the ', tokens: 20});
  expect(t.sample({prompt: 'the ', tokens: 20}) === sample && sample.length > 0, 'the same seed gives another text');
  expect(t.lossHash() === hash, 'sampling changed the run');
  expect(profile.length > 5 && profile[0].ms > 0, 'no times of ops');
  expect(Math.abs(validation - rows[STEPS - 1].validation) < 1e-12, 'validate() is not what step() validated');

  // Out of the page, continued by the program, and back.
  const returned = unzip(await post('/continue', zip(files)));
  const again = v.resume(returned, {text});
  expect(again.stepCount === STEPS + 5, `the program stopped at ${again.stepCount}`);
  while (again.stepCount < ALL_STEPS) again.step();
  const end = again.lossHash();
  await post('/finished', zip(again.save()));
  throws(() => again.step(), 'the run is over');
  throws(() => v.resume(files, {text: text.slice(1)}), 'has changed');
  throws(() => v.trainer({...SETTINGS, text, heads: 3}), 'heads');
  throws(() => v.trainer({...SETTINGS, text, sise: 3}), 'there is no setting "sise"');
  throws(() => v.trainer({...SETTINGS, text: text.slice(0, 20)}), '');

  // Weights alone begin a new run with the loss that they had.
  const weights = files.get(`checkpoint-000000${STEPS}/model.safetensors`);
  const other = v.trainer({...SETTINGS, text, weights});
  expect(other.step().loss < losses[0], 'the weights were not used');
  other.close();
  again.close();
  t.close();
  return {losses, hash, end, sample, ms: rows.slice(5).map(row => row.ms).sort((a, b) => a - b)[7]};
}

function proofs(v, ops) {
  let rows = 0;
  const begin = performance.now(), failures = [];
  const onRow = row => { rows++; if (!row.ok) failures.push(`${row.op}.${row.pass} ${row.output} ${row.dtype} ${row.case}: ${row.why}`); };
  const all = v.check({device: 'cpu', quick: true, ops, onRow});
  expect(rows === all.rows, 'a row was not shown');
  const broken = v.checkBroken('rms_norm');
  expect(!broken.ok && broken.failed > 0, 'a broken kernel was not found');
  expect(v.check({ops: ['rms_norm']}).ok, 'the kernel stays broken');
  return {rows: all.rows, failed: all.failed, failures: failures.slice(0, 20), broken: broken.failed,
          seconds: (performance.now() - begin) / 1e3};
}

onmessage = async ({data: {variant, threads, ops}}) => {
  try {
    const seconds = {};
    const timed = async (name, work) => {
      const begin = performance.now(), result = await work();
      seconds[name] = Math.round(performance.now() - begin) / 1e3;
      return result;
    };
    const v = await timed('load', () => load({variant, threads: Number(threads)}));
    const text = await bytesOf('/text.txt');
    await timed('calls', () => calls(v));
    await timed('graphs', () => graphs(v));
    const train = await timed('training', () => training(v, text));
    const hashes = await timed('bits', () => bits(v.variant, v.threads));
    const proof = await timed('proofs', () => proofs(v, ops ? ops.split(',') : undefined));
    postMessage({probe: probe(), variant: v.variant, fused: v.fused, threads: v.threads, bytes: v.memory().bytes, train,
                 hashes, proof, seconds});
  } catch (error) {
    postMessage({error: `${error.message}\n${error.stack}`});
  }
};
