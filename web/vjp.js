// SPDX-License-Identifier: MIT
// vjp in a browser: the C library, its trainer and its proofs, compiled to WebAssembly.
//
//   import {load} from './vjp.js';
//   const v = await load();
//   const {y} = v.open('cpu').call('cumsum', 'forward', {x: new Float32Array([1, 2, 3])});
//
// Everything but load() computes before it returns, so a page that does more than a few small calls should do it in a
// worker; only there can it use several threads. Functions throw an Error with vjp's own sentence. README.md documents
// all of it.
import {Files, systemCalls} from './wasi.js';
export {zip, unzip} from './zip.js';

const DTYPES = ['f32', 'bf16', 'f16', 'f64', 'i32', 'i64'];
const ARRAYS = {f32: Float32Array, bf16: Uint16Array, f16: Uint16Array, f64: Float64Array, i32: Int32Array,
                i64: BigInt64Array};
const PAGES = 512, MAX_PAGES = 32768; // of 64 KiB: at first, and as the module was linked
const STACK_BYTES = 1 << 20;          // of a thread; every op needs less than 192 KiB
const MAX_THREADS = 32;

// ---- What the browser can do --------------------------------------------------------------------------

// A function f(a, b, c) that returns f32x4.relaxed_madd(a, b, c), as a module.
const RELAXED = new Uint8Array([
  0, 0x61, 0x73, 0x6d, 1, 0, 0, 0, 1, 8, 1, 0x60, 3, 0x7d, 0x7d, 0x7d, 1, 0x7d, 3, 2, 1, 0, 7, 5, 1, 1, 0x66, 0, 0,
  0x0a, 0x16, 1, 0x14, 0, 0x20, 0, 0xfd, 0x13, 0x20, 1, 0xfd, 0x13, 0x20, 2, 0xfd, 0x13, 0xfd, 0x85, 2, 0xfd, 0x1f, 0,
  0x0b]);

/**
 * {relaxed, fused, threads}: whether there is relaxed SIMD, whether its multiply-add rounds once on this processor, and
 * whether memory can be shared between threads (the page needs the headers COOP and COEP for it).
 */
export function probe() {
  const relaxed = WebAssembly.validate(RELAXED);
  let fused = false;
  if (relaxed) {
    // (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24, of which nothing is left if the product is rounded first.
    const {f} = new WebAssembly.Instance(new WebAssembly.Module(RELAXED)).exports;
    fused = f(1 + 2 ** -12, 1 + 2 ** -12, -(1 + 2 ** -11)) !== 0;
  }
  return {relaxed, fused, threads: globalThis.crossOriginIsolated === true && typeof SharedArrayBuffer === 'function'};
}

// The main thread of a page may not wait for other threads.
const MAY_WAIT = typeof document === 'undefined';

// ---- Loading ------------------------------------------------------------------------------------------

/**
 * Loads the module. `url`: the folder of the .wasm files, by default that of this file. `threads`: how many to compute
 * with, by default one per core. `variant`: relaxed-threads, relaxed, simd-threads or simd, by default what the browser
 * can do: relaxed only where its multiply-add is fused, since the bits are others where it is not. `gpu`: whether the
 * device 'webgpu' can be opened afterwards; an Error if it cannot. `print(text, isError)` gets what C prints.
 */
export async function load({url, threads, variant, gpu = false, print, name = 'vjp'} = {}) {
  const can = probe();
  if (gpu) requireGpu(can, variant);
  const wanted = threads ?? (globalThis.navigator?.hardwareConcurrency || 1);
  if (variant?.endsWith('-threads') && !can.threads)
    throw new Error(`vjp: ${variant} needs shared memory, which this page may not use: its server must send the headers ` +
                    'Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp');
  const base = new URL(url ?? './', url ? globalThis.location?.href ?? import.meta.url : import.meta.url);
  let response;
  for (const each of variant ? [variant] : candidates(can, MAY_WAIT && (wanted > 1 || gpu))) {
    response = await fetch(new URL(`${name}-${each}.wasm`, base));
    variant = each;
    if (response.ok) break;
  }
  if (!response.ok) throw new Error(`vjp: ${response.url} cannot be loaded (${response.status})`);
  const parallel = variant.endsWith('-threads');
  const count = parallel && MAY_WAIT ? Math.max(1, Math.min(wanted, MAX_THREADS)) : 1;
  const module = await WebAssembly.compile(await response.arrayBuffer());
  const memory = new WebAssembly.Memory({initial: PAGES, maximum: MAX_PAGES, shared: parallel});
  const v = new Vjp(variant, can, memory, print);
  const {exports} = await WebAssembly.instantiate(module, v.imports());
  v.begin(exports);
  await v.startThreads(module, count);
  if (gpu && !parallel) throw new Error('vjp: the GPU needs a module for threads, and the server has none');
  if (gpu) await v.startGpu();
  return v;
}

// The thread that computes waits for the worker of the GPU, in memory that they share.
function requireGpu(can, variant) {
  if (!globalThis.navigator?.gpu) throw new Error('vjp: this browser has no WebGPU');
  if (!MAY_WAIT) throw new Error('vjp: WebGPU needs a worker: the main thread of a page may not wait for it');
  if (!can.threads)
    throw new Error('vjp: WebGPU needs shared memory, which this page may not use: its server must send the headers ' +
                    'Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp');
  if (variant && !variant.endsWith('-threads')) throw new Error(`vjp: WebGPU needs a module for threads, not ${variant}`);
}

// The variants that the browser can run, best first: those after the first are for servers that have not all of them. A
// module for threads also runs with one.
function candidates(can, several) {
  const kinds = can.relaxed && can.fused ? ['relaxed', 'simd'] : ['simd'];
  return kinds.flatMap(kind => !can.threads ? [kind] : several ? [kind + '-threads', kind] : [kind, kind + '-threads']);
}

class Vjp {
  #exports;
  #memory;
  #errors = ''; // the end of what C printed to stderr
  #row = null;  // where rows of a proof go
  #runs = 0;
  #workers = [];
  #gpu = null; // the worker that owns it

  constructor(variant, can, memory, print) {
    this.variant = variant;
    /** Whether results have the same bits as those of vjp's other instruction sets. */
    this.fused = variant.startsWith('relaxed') && can.fused;
    this.threads = 1;
    /** The files that C sees. */
    this.files = new Files();
    this.print = print ?? (() => {});
    this.#memory = memory;
  }

  imports() {
    const print = (text, isError) => {
      if (isError) this.#errors = (this.#errors + text).slice(-1000);
      this.print(text, isError);
    };
    return {
      env: {memory: this.#memory},
      wasi_snapshot_preview1: systemCalls(this.#memory, this.files, print),
      vjp: {
        row: at => this.#row?.(JSON.parse(this.text(at))),
        gpu: (at, count, data, bytes) => this.#send(at, count, data, bytes),
      },
    };
  }

  begin(exports) {
    this.#exports = exports;
    exports._initialize();
  }

  async startThreads(module, count) {
    const c = this.#exports;
    for (let number = 0; number < count - 1; number++) {
      const stack = c.malloc(STACK_BYTES), local = c.malloc(Math.max(c.__tls_size.value, 16));
      if (!stack || !local) throw new Error('vjp: no memory for the stack of a thread');
      const worker = new Worker(new URL('thread.js', import.meta.url), {type: 'module'});
      await new Promise((resolve, reject) => {
        worker.onmessage = ({data}) => data.error ? reject(new Error(`vjp: a thread failed: ${data.error}`)) : resolve();
        worker.onerror = event => reject(new Error(`vjp: a thread cannot be started: ${event.message}`));
        const top = (stack + STACK_BYTES) & ~15;
        worker.postMessage({module, memory: this.#memory, number, stack: top, local});
      });
      this.#workers.push(worker);
    }
    this.threads = count;
    if (count > 1) c.vjp_web_set_workers(count - 1);
  }

  async startGpu() {
    const worker = new Worker(new URL('gpu.js', import.meta.url), {type: 'module'});
    await new Promise((resolve, reject) => {
      worker.onmessage = resolve;
      worker.onerror = event => reject(new Error(`vjp: the worker of the GPU cannot be started: ${event.message}`));
      worker.postMessage({memory: this.#memory});
    });
    this.#gpu = worker;
    this.#workers.push(worker);
  }

  // Commands of C and the data of the last of them. They are copied: C uses their memory again.
  #send(at, count, data, bytes) {
    if (!this.#gpu) return 0;
    if (!count) return 1;
    const words = new Uint32Array(this.#memory.buffer, at >>> 0, count).slice();
    const copy = bytes ? this.bytes(data >>> 0, bytes).slice() : null;
    this.#gpu.postMessage({words, data: copy}, copy ? [words.buffer, copy.buffer] : [words.buffer]);
    return 1;
  }

  /** Ends the threads; nothing may be called afterwards. */
  close() {
    for (const worker of this.#workers) worker.terminate();
    this.#workers = [];
  }

  /** {bytes}: what the module has of memory. It never shrinks. */
  memory() {
    return {bytes: this.#memory.buffer.byteLength};
  }

  // ---- Between JavaScript and C; also for tests ----

  /** The functions of the module. */
  get c() {
    return this.#exports;
  }

  /** The text at an address, up to its zero. */
  text(at) {
    const bytes = new Uint8Array(this.#memory.buffer);
    let end = at;
    while (bytes[end]) end++;
    return new TextDecoder().decode(bytes.slice(at, end));
  }

  bytes(at, count) {
    return new Uint8Array(this.#memory.buffer, at, count);
  }

  allocate(bytes) {
    const at = this.#exports.malloc(Math.max(bytes, 1));
    if (!at) throw new Error('out of memory');
    return at;
  }

  /** Calls use(addresses) with texts (null stays 0) and typed arrays in the module's memory, and frees them. */
  with(values, use) {
    const at = [];
    try {
      for (const value of values) {
        if (value === null || value === undefined) {
          at.push(0);
          continue;
        }
        const bytes = typeof value === 'string' ? new TextEncoder().encode(value + '\0')
                                                : new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
        const place = this.allocate(bytes.length);
        at.push(place);
        this.bytes(place, bytes.length).set(bytes);
      }
      return use(...at);
    } finally {
      for (const place of at) if (place) this.#exports.free(place);
    }
  }

  /** What a function returned, or its failure thrown. */
  require(result, sentence) {
    if (!result) throw new Error(sentence ?? this.text(this.#exports.vjp_web_error()));
    return result;
  }

  /** A JSON text that C allocated. */
  json(at) {
    this.require(at);
    try {
      return JSON.parse(this.text(at));
    } finally {
      this.#exports.free(at);
    }
  }

  // ---- Ops ----

  /** The table of ops: [{name, about, formula, passes: {forward: {inputs, outputs}, backward}, attributes}]. */
  ops() {
    return this.json(this.#exports.vjp_web_ops());
  }

  /** Opens 'cpu', 'ref' or, if the module was loaded with `gpu`, 'webgpu'. */
  open(name = 'cpu', {threads = 0} = {}) {
    const at = this.with([name], text => this.require(this.#exports.vjp_web_open(text, threads)));
    return new Device(this, at, name);
  }

  graph() {
    return new Graph(this);
  }

  /** A call of an op in the making; `use` gets its address. */
  withCall(op, pass, attributes, use) {
    const number = {forward: 0, backward: 1}[pass];
    if (number === undefined) throw new Error(`the pass is "${pass}"; it must be forward or backward`);
    const c = this.#exports;
    const call = this.with([op], name => this.require(c.vjp_web_call_begin(name, number)));
    try {
      for (const [name, value] of Object.entries(attributes ?? {})) {
        const choice = typeof value === 'string' ? value : null;
        this.with([name, choice], (key, text) =>
          this.require(c.vjp_web_call_attribute(call, key, choice === null ? Number(value) : 0, text)));
      }
      return use(call);
    } finally {
      c.vjp_web_call_end(call);
    }
  }

  // ---- Training ----

  /**
   * A new run of `vjp train` on `text`, a Uint8Array or a string. The other settings are the program's, under the names
   * of its options: preset, dim, layers, heads, kv_heads, ffn, context, batch, steps, lr, warmup, seed, dtype, ...; see
   * README.md. `from`: the files of a model to begin with; `weights`: its model.safetensors alone.
   */
  trainer({text, device = 'cpu', threads = 0, from, weights, dataPath = '/text.txt', ...settings}) {
    if (typeof text === 'string') text = new TextEncoder().encode(text);
    if (!(text instanceof Uint8Array)) throw new Error('the text is missing: a Uint8Array or a string');
    this.files.write(dataPath, text);
    settings.data = dataPath;
    if (weights) from = this.#folderOf(weights, settings);
    if (from) {
      settings.from = `/from-${++this.#runs}`;
      for (const [path, bytes] of from) this.files.write(`${settings.from}/${path}`, bytes);
    }
    const out = `/run-${++this.#runs}`;
    const at = this.with([device, JSON.stringify(settings), out], (name, json, folder) =>
      this.require(this.#exports.vjp_web_trainer_begin(name, json, folder, threads)));
    return new Trainer(this, at, out, text);
  }

  // A folder in which these weights belong to the model of the settings.
  #folderOf(weights, settings) {
    const out = `/run-${++this.#runs}`;
    const at = this.with(['cpu', JSON.stringify(settings), out], (name, json, folder) =>
      this.require(this.#exports.vjp_web_trainer_begin(name, json, folder, 1)));
    const trainer = new Trainer(this, at, out, null);
    const files = trainer.save();
    trainer.close();
    const config = [...files].find(([path]) => path.endsWith('config.json'))[1];
    return new Map([['config.json', config], ['model.safetensors', weights]]);
  }

  /**
   * Continues a run from the files that Trainer.save() or `vjp train` made, bit for bit. `text`: that of the run, by
   * default its text.txt. `allowOtherBits`: even if this browser or device computes other last bits.
   */
  resume(files, {text, device = 'cpu', threads = 0, allowOtherBits = false} = {}) {
    if (typeof text === 'string') text = new TextEncoder().encode(text);
    text ??= files.get('text.txt');
    if (!text) throw new Error('the text of the run is missing: a checkpoint does not hold it');
    const out = `/run-${++this.#runs}`, data = '/text.txt';
    this.files.write(data, text);
    for (const [path, bytes] of files) if (path !== 'text.txt') this.files.write(`${out}/${path}`, bytes);
    const at = this.with([device, out, data], (name, folder, place) =>
      this.require(this.#exports.vjp_web_trainer_resume(name, folder, place, allowOtherBits, threads)));
    return new Trainer(this, at, out, text);
  }

  // ---- Proofs ----

  /**
   * What `vjp check` does, for the ops of the list or for all, in one dtype or in all. `brief`: one case of each op, in
   * the plain form of the call. onRow gets each row as it is made: {proof, op, pass, output, dtype, device, case,
   * error, bound, ok, why}. Returns {rows, failed, ok}.
   */
  check({ops, ...options} = {}) {
    return this.#prove(ops ?? [null], false, options);
  }

  /** The same for one op whose kernels are broken on purpose: one element of an output is damaged. */
  checkBroken(op, options = {}) {
    return this.#prove([op], true, options);
  }

  #prove(ops, broken, {device = 'cpu', dtype, quick = true, brief = false, seed = 0, onRow}) {
    const type = dtype === undefined ? -1 : DTYPES.indexOf(dtype);
    if (dtype !== undefined && type < 0) throw new Error(`unknown dtype "${dtype}"`);
    const opened = typeof device === 'string' ? this.open(device) : device;
    const result = {rows: 0, failed: 0};
    this.#row = onRow ?? null;
    try {
      for (const op of ops) {
        const one = this.with([op], name =>
          this.json(this.#exports.vjp_web_check(opened.at, name, type, quick, brief, seed, broken)));
        result.rows += one.rows;
        result.failed += one.failed;
      }
    } finally {
      this.#row = null;
      if (opened !== device) opened.close();
    }
    return {...result, ok: result.failed === 0};
  }
}

// ---- Tensors ------------------------------------------------------------------------------------------

// A number, an array, a typed array or {data, shape, dtype} as {data: typed array, shape, dtype: number}.
function tensorOf(name, value) {
  let {data, shape, dtype} = ArrayBuffer.isView(value) || Array.isArray(value) || typeof value === 'number'
                             ? {data: value} : value ?? {};
  if (data === undefined) throw new Error(`${name} is missing`);
  if (typeof data === 'number') shape ??= [], data = [data];
  if (Array.isArray(data)) data = ARRAYS[dtype ?? 'f32']?.from(data);
  dtype ??= Object.keys(ARRAYS).find(key => data instanceof ARRAYS[key]);
  const number = DTYPES.indexOf(dtype);
  if (number < 0 || !(data instanceof ARRAYS[dtype]))
    throw new Error(`${name} must be a typed array of its dtype: ${DTYPES.join(', ')}`);
  shape ??= [data.length];
  if (shape.reduce((product, size) => product * size, 1) !== data.length)
    throw new Error(`${name} has ${data.length} elements, which do not fill [${shape.join(', ')}]`);
  return {data, shape, dtype: number};
}

function resultOf(v, {dtype, shape, data}) {
  const count = shape.reduce((product, size) => product * size, 1), type = ARRAYS[dtype];
  return {data: new type(v.bytes(data, count * type.BYTES_PER_ELEMENT).slice().buffer), shape, dtype};
}

const sizes = shape => BigInt64Array.from(shape, BigInt);

// ---- Devices ------------------------------------------------------------------------------------------

class Device {
  #v;

  constructor(v, at, name) {
    this.#v = v;
    this.at = at;
    this.name = name;
    this.summary = v.text(v.c.vjp_device_summary(at));
  }

  /** 'instruction_set', 'threads', 'matrix_products'; '' where the device has no such thing. */
  property(name) {
    return this.#v.with([name], key => this.#v.text(this.#v.c.vjp_web_property(this.at, key)));
  }

  /**
   * Calls an op: device.call('rms_norm', 'forward', {x: {data, shape}, gamma}, {eps: 1e-5}) returns {y: {data, shape,
   * dtype}, ...}. `outputs`: the names of those to compute, by default all that this call can have. An output that is
   * given among the tensors is added to.
   */
  call(op, pass, tensors, attributes, {outputs} = {}) {
    const v = this.#v, c = v.c, places = [];
    try {
      return v.withCall(op, pass, attributes, call => {
        for (const [name, value] of Object.entries(tensors)) {
          if (value === null || value === undefined) continue;
          const {data, shape, dtype} = tensorOf(name, value);
          const place = v.allocate(data.byteLength);
          places.push(place);
          v.bytes(place, data.byteLength).set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
          v.with([name, sizes(shape)], (key, list) =>
            v.require(c.vjp_web_call_tensor(call, key, dtype, shape.length, list, place)));
        }
        if (outputs) {
          const all = v.ops().find(one => one.name === op).passes[pass].outputs;
          for (const {name} of all)
            v.with([name], key => v.require(c.vjp_web_call_want(call, key, outputs.includes(name))));
        }
        v.require(c.vjp_web_call_run(this.at, call));
        const results = v.json(c.vjp_web_call_results(call));
        return Object.fromEntries(results.map(one => [one.name, resultOf(v, one)]));
      });
    } finally {
      for (const place of places) c.free(place);
    }
  }

  close() {
    if (this.at) this.#v.c.vjp_close(this.at);
    this.at = 0;
  }
}

// ---- Graphs -------------------------------------------------------------------------------------------

/** Ops on named values, differentiated. A value is a number. A mistake is thrown by the call that made it. */
class Graph {
  #v;
  #at;

  constructor(v) {
    this.#v = v;
    this.#at = v.require(v.c.vjp_graph_create(), 'out of memory');
  }

  #value(value) {
    if (!value) throw new Error(this.#v.text(this.#v.c.vjp_graph_error(this.#at)));
    return value;
  }

  #leaf(make, name, shape, dtype) {
    const number = DTYPES.indexOf(dtype);
    if (number < 0) throw new Error(`${name}: the dtype is "${dtype}"; it must be one of ${DTYPES.join(', ')}`);
    return this.#value(this.#v.with([name, sizes(shape)], (key, list) => make(this.#at, key, number, shape.length, list)));
  }

  /** What changes from run to run. */
  input(name, shape, dtype = 'f32') {
    return this.#leaf(this.#v.c.vjp_graph_input, name, shape, dtype);
  }

  /** What is kept from run to run; zero at first. */
  parameter(name, shape, dtype = 'f32') {
    return this.#leaf(this.#v.c.vjp_graph_parameter, name, shape, dtype);
  }

  /** A node: its first output. graph.op('linear', {x, weight}) */
  op(name, inputs, attributes) {
    const v = this.#v;
    return this.#value(v.withCall(name, 'forward', attributes, call => {
      for (const [slot, value] of Object.entries(inputs))
        v.with([slot], key => v.require(v.c.vjp_web_call_value(call, key, value)));
      return v.c.vjp_web_graph_call(this.#at, call);
    }));
  }

  /** Another output of the node that made `value`. */
  output(value, slot) {
    return this.#value(this.#v.with([slot], key => this.#v.c.vjp_graph_output(this.#at, value, key)));
  }

  /** The gradients of a scalar with respect to values. */
  grad(scalar, values) {
    const v = this.#v, list = Int32Array.from(values);
    return v.with([list, list], (wrt, gradients) => {
      const status = v.c.vjp_graph_grad(this.#at, scalar, wrt, list.length, 0, 0, gradients);
      if (status !== 0) this.#value(0);
      return [...new Int32Array(v.bytes(gradients, list.byteLength).slice().buffer)];
    });
  }

  /** {name, dtype, shape} */
  describe(value) {
    return this.#v.json(this.#v.c.vjp_web_graph_describe(this.#at, value));
  }

  /** The graph as text, one line per node. */
  toString() {
    const at = this.#v.require(this.#v.c.vjp_graph_text(this.#at), 'out of memory'), text = this.#v.text(at);
    this.#v.c.vjp_string_free(at);
    return text;
  }

  /** A program that computes `results` on a device. */
  compile(device, results) {
    const v = this.#v;
    const at = v.with([Int32Array.from(results)], list =>
      v.require(v.c.vjp_web_compile(device.at, this.#at, list, results.length)));
    return new Program(v, device, this, at);
  }

  close() {
    if (this.#at) this.#v.c.vjp_graph_destroy(this.#at);
    this.#at = 0;
  }
}

/** A compiled graph. The graph must stay open for read() and write(). */
class Program {
  #v;
  #device;
  #graph;
  #at;

  constructor(v, device, graph, at) {
    this.#v = v;
    this.#device = device;
    this.#graph = graph;
    this.#at = at;
  }

  #done(status) {
    if (status !== 0) throw new Error(this.#v.text(this.#v.c.vjp_web_device_error(this.#device.at)));
  }

  /** Writes an input or a parameter. */
  write(value, data) {
    const {name, dtype} = this.#graph.describe(value);
    const array = tensorOf(name, ArrayBuffer.isView(data) ? {data, dtype} : {...data, dtype}).data;
    this.#v.with([array], at => this.#done(this.#v.c.vjp_program_write(this.#at, value, at, array.byteLength)));
  }

  run() {
    this.#done(this.#v.c.vjp_program_run(this.#at));
  }

  /** {data, shape, dtype} of a result, an input or a parameter. */
  read(value) {
    const v = this.#v, {dtype, shape} = this.#graph.describe(value);
    const bytes = shape.reduce((product, size) => product * size, 1) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    const at = v.allocate(bytes);
    try {
      this.#done(v.c.vjp_program_read(this.#at, value, at, bytes));
      return resultOf(v, {dtype, shape, data: at});
    } finally {
      v.c.free(at);
    }
  }

  close() {
    if (this.#at) this.#v.c.vjp_program_destroy(this.#at);
    this.#at = 0;
  }
}

// ---- Training -----------------------------------------------------------------------------------------

/** A run of `vjp train`: the same losses and the same files, bit for bit, where `fused` is true. */
class Trainer {
  #v;
  #at;
  #out;
  #text;

  constructor(v, at, out, text) {
    this.#v = v;
    this.#at = at;
    this.#out = out;
    this.#text = text;
    const {step, parameters} = this.describe();
    /** Steps taken so far, and numbers that are trained. */
    this.stepCount = step;
    this.parameters = parameters;
  }

  /** {step, device, parameters, items, calls, flops, arena, kept, dim, layers, heads, kv_heads, ffn, settings}. */
  describe() {
    return this.#v.json(this.#v.c.vjp_web_trainer_describe(this.#at));
  }

  /** Of the run's device, as Device.property(): on a GPU 'waits', 'dispatches', 'submissions', 'pipelines'. */
  property(name) {
    return this.#v.with([name], key => this.#v.text(this.#v.c.vjp_web_trainer_property(this.#at, key)));
  }

  /** All steps so far, also those before the run was resumed, as step() returns them but for ms and over. */
  rows() {
    return this.#v.json(this.#v.c.vjp_web_trainer_rows(this.#at));
  }

  /** {step, loss, smoothed, validation?, norm, lr, tokens, seconds, ms, over}. Validates when it is due. */
  step() {
    const row = this.#v.json(this.#v.c.vjp_web_trainer_step(this.#at));
    this.stepCount = row.step;
    return row;
  }

  /** The loss of the part of the text that is not trained on. */
  validate() {
    const loss = this.#v.c.vjp_web_trainer_validate(this.#at);
    if (Number.isNaN(loss)) this.#v.require(0);
    return loss;
  }

  /** What the model writes after the prompt. `top_k` 0: chooses among all tokens. */
  sample({prompt = '', tokens = 200, temperature = 0.8, top_k = 40, seed = 1} = {}) {
    const v = this.#v;
    return v.with([prompt, new Uint32Array(1)], (text, length) => {
      const at = v.require(v.c.vjp_web_trainer_sample(this.#at, text, tokens, temperature, top_k, seed, length));
      const bytes = v.bytes(at, new DataView(v.bytes(length, 4).slice().buffer).getUint32(0, true)).slice();
      v.c.free(at);
      return new TextDecoder().decode(bytes);
    });
  }

  /**
   * Milliseconds per step by op and pass, longest first: [{op, pass, ms}]. On the processor the mean of every eighth
   * step; on a GPU those of the step after the last call of this function, which alone waits for each op; [] at first.
   */
  profile() {
    return this.#v.json(this.#v.c.vjp_web_trainer_profile(this.#at));
  }

  /** A hash of the losses of all steps; `vjp train` prints the same as "losses". '' if the run never kept one. */
  lossHash() {
    return this.#v.text(this.#v.c.vjp_web_trainer_hash(this.#at));
  }

  /** {bytes, arena, kept}: of the module, of what a step reuses, of parameters and moments. */
  memory() {
    const {arena, kept} = this.describe();
    return {...this.#v.memory(), arena, kept};
  }

  /**
   * Saves a checkpoint and returns the files of the run, as `vjp train` writes them: a Map from path to Uint8Array, with
   * the newest checkpoint, and text.txt.
   */
  save() {
    const v = this.#v;
    v.require(v.c.vjp_web_trainer_save(this.#at));
    const newest = `checkpoint-${String(this.stepCount).padStart(8, '0')}/`, files = new Map();
    for (const path of v.files.list(this.#out))
      if (!path.startsWith('.') && (!path.startsWith('checkpoint-') || path.startsWith(newest)))
        files.set(path, v.files.read(`${this.#out}/${path}`));
    if (this.#text) files.set('text.txt', this.#text);
    return files;
  }

  /** Ends the run and forgets its files. */
  close() {
    if (!this.#at) return;
    this.#v.c.vjp_web_trainer_end(this.#at);
    this.#v.files.remove(this.#out);
    this.#at = 0;
  }
}
