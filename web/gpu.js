// SPDX-License-Identifier: MIT
// The worker that owns the GPU. The worker that computes sleeps while it waits for the GPU, so it could never hear that
// the GPU has finished: it sends commands here instead (src/gpu/webgpu/browser.h), and the answers are written into
// the memory that both share.
//
// A message is {words, data}: commands with their arguments, 32 bits each, and the data of the last command. Objects have
// numbers that the sender chose.

// Of src/gpu/webgpu/browser.c.
const EVENTS = 64, TEXT = 384, HEAD = 8, EVENT = 12 + TEXT;
const ON_ERROR = 1, ON_LOST = 2, FIRST_CALLBACK = 3;
const FILTERS = {1: 'validation', 2: 'out-of-memory', 3: 'internal'};
const TYPES = {2: 'uniform', 3: 'storage', 4: 'read-only-storage'}; // WGPUBufferBindingType
const MAX_BYTES = 0x7fffff00; // the module's numbers of bytes have 32 bits

let memory = null, ring = 0;
const devices = new Map();  // from the sender's number: {adapter, device, encoders, doomed}
const objects = new Map();

const object = number => objects.get(number);
const device = number => devices.get(number).device;

function putText(at, text) {
  const bytes = new TextEncoder().encode(text).subarray(0, TEXT - 1);
  const to = new Uint8Array(memory.buffer, at, TEXT);
  to.set(bytes);
  to[bytes.length] = 0;
}

/* Writes an event and wakes the thread that waits for it. Errors may be dropped, since the first one counts: they fill at
 * most a quarter of the ring, and callbacks, of which at most half as many as events are awaited, always have room. */
function tell(token, number, failed, text = '') {
  const counts = new Uint32Array(memory.buffer, ring, 2);
  const written = Atomics.load(counts, 0), waiting = (written - Atomics.load(counts, 1)) >>> 0;
  if (waiting >= (token < FIRST_CALLBACK ? EVENTS / 4 : EVENTS)) return;
  const at = ring + HEAD + (written % EVENTS) * EVENT;
  new Uint32Array(memory.buffer, at, 3).set([token, number, failed ? 1 : 0]);
  putText(at + 12, text);
  Atomics.store(counts, 0, written + 1);
  Atomics.notify(new Int32Array(memory.buffer, ring, 1), 0);
}

/* Tells when a promise is done; `then` may do something with its result first, and return the text of a failure. */
function later(token, number, promise, then) {
  promise.then(result => {
    const failure = then?.(result);
    if (token) tell(token, number, !!failure, failure);
  }).catch(error => token && tell(token, number, true, String(error.message || error)));
}

function describe(adapter) {
  const {vendor, architecture, device, description} = adapter.info ?? {};
  return [vendor, architecture, description || device].filter(part => part).join(' ') || 'a GPU';
}

function openAdapter(token, number, at) {
  if (!navigator.gpu) return tell(token, number, true, 'this browser has no WebGPU in workers');
  later(token, number, navigator.gpu.requestAdapter({powerPreference: 'high-performance'}), adapter => {
    if (!adapter) return 'the browser has WebGPU, but gives no adapter: no GPU that it trusts';
    const {limits} = adapter;
    new Uint32Array(memory.buffer, at, 4).set([
      Math.min(limits.maxStorageBufferBindingSize, MAX_BYTES), Math.min(limits.maxBufferSize, MAX_BYTES),
      limits.maxComputeWorkgroupsPerDimension, limits.maxStorageBuffersPerShaderStage]);
    putText(at + 16, describe(adapter));
    devices.set(number, {adapter, encoders: 0, doomed: []});
  });
}

function openDevice(token, number, binding, buffer, storage) {
  const requiredLimits = {maxStorageBufferBindingSize: binding, maxBufferSize: buffer, maxStorageBuffersPerShaderStage: storage};
  const own = devices.get(number);
  later(token, number, own.adapter.requestDevice({requiredLimits}), made => {
    own.device = made;
    made.onuncapturederror = ({error}) => tell(ON_ERROR, number, true, error.message);
    made.lost.then(({message}) => devices.get(number) === own && tell(ON_LOST, number, true, message));
  });
}

/* The range is copied into the module's memory, so the buffer is free again when the event comes. */
function map(token, number, buffer, at, bytes, to) {
  later(token, number, buffer.mapAsync(GPUMapMode.READ, at, bytes), () => {
    new Uint8Array(memory.buffer, to, bytes).set(new Uint8Array(buffer.getMappedRange(at, bytes)));
    buffer.unmap();
  });
}

/* A buffer that was released while commands are encoded may be used by them: it is destroyed once they are submitted.
 * Without that its memory would be the garbage collector's to free, which sees none of it. */
function destroyDoomed(own) {
  if (own.encoders > 0) return;
  for (const buffer of own.doomed) buffer.destroy();
  own.doomed = [];
}

function release(number) {
  const released = object(number);
  objects.delete(number);
  if (!(released instanceof GPUBuffer)) return;
  const own = devices.get(released.owner);
  if (!own) return; // the device is gone, and its buffers with it
  own.doomed.push(released);
  destroyDoomed(own);
}

function ended(own) {
  own.encoders--;
  destroyDoomed(own);
}

/* The commands, in the order of browser.h's list: from the arguments' words to the GPU. `take` reads the next word. */
const commands = [
  null,
  /* ADAPTER */ take => { const token = take(), number = take(), at = take(); ring = take(); openAdapter(token, number, at); },
  /* DEVICE */ take => openDevice(take(), take(), take(), take(), take()),
  /* DESTROY */ take => { const number = take(), own = devices.get(number); devices.delete(number); own?.device?.destroy(); },
  /* BUFFER */ take => {
    const owner = take(), number = take(), made = device(owner).createBuffer({size: take(), usage: take()});
    made.owner = owner;
    objects.set(number, made);
  },
  /* WRITE */ (take, data) => device(take()).queue.writeBuffer(object(take()), take(), data),
  /* MAP */ take => map(take(), take(), object(take()), take(), take(), take()),
  /* SHADER */ (take, data) => {
    const owner = device(take());
    objects.set(take(), owner.createShaderModule({code: new TextDecoder().decode(data)}));
  },
  /* LAYOUT */ take => {
    const owner = device(take()), number = take(), count = take();
    const entries = Array.from({length: count}, (_, binding) => ({
      binding, visibility: GPUShaderStage.COMPUTE,
      buffer: {type: TYPES[take()], hasDynamicOffset: take() !== 0, minBindingSize: take()}}));
    objects.set(number, owner.createBindGroupLayout({entries}));
  },
  /* PIPELINE */ take => {
    const owner = device(take()), number = take();
    const layout = owner.createPipelineLayout({bindGroupLayouts: [object(take())]});
    objects.set(number, owner.createComputePipeline({layout, compute: {module: object(take()), entryPoint: 'main'}}));
  },
  /* BIND */ take => {
    const owner = device(take()), number = take(), layout = object(take()), count = take();
    const entries = Array.from({length: count}, () => ({
      binding: take(), resource: {buffer: object(take()), offset: take(), size: take()}}));
    objects.set(number, owner.createBindGroup({layout, entries}));
  },
  /* ENCODER */ take => {
    const owner = take(), encoder = device(owner).createCommandEncoder();
    encoder.own = devices.get(owner);
    encoder.own.encoders++;
    objects.set(take(), encoder);
  },
  /* PASS */ take => { const pass = object(take()).beginComputePass(); objects.set(take(), pass); },
  /* SET_PIPELINE */ take => object(take()).setPipeline(object(take())),
  /* SET_BIND */ take => object(take()).setBindGroup(0, object(take()), [take()]),
  /* DISPATCH */ take => object(take()).dispatchWorkgroups(take(), take(), take()),
  /* END */ take => object(take()).end(),
  /* COPY */ take => object(take()).copyBufferToBuffer(object(take()), take(), object(take()), take(), take()),
  /* FINISH */ take => {
    const encoder = object(take()), made = encoder.finish();
    made.own = encoder.own;
    objects.set(take(), made);
  },
  /* SUBMIT */ take => device(take()).queue.submit([object(take())]),
  /* RELEASE */ take => {
    const number = take(), {own} = object(number) ?? {};
    // An encoder is released after its commands were submitted, or never will be.
    if (own && object(number) instanceof GPUCommandEncoder) ended(own);
    release(number);
  },
  /* PUSH_SCOPE */ take => device(take()).pushErrorScope(FILTERS[take()]),
  /* POP_SCOPE */ take => {
    const token = take(), number = take();
    later(token, number, device(number).popErrorScope(), error => error?.message);
  },
  /* WORK_DONE */ take => { const token = take(), number = take(); later(token, number, device(number).queue.onSubmittedWorkDone()); },
];

function obey({words, data}) {
  let at = 0;
  const take = () => words[at++];
  try {
    while (at < words.length) commands[take()](take, data);
  } catch (error) {
    // Nothing after it can be trusted: a refused argument, or a device that is gone.
    for (const number of devices.keys()) tell(ON_LOST, number, true, `the worker of the GPU failed: ${error.message}`);
  }
}

onmessage = ({data}) => {
  if (data.memory) {
    memory = data.memory;
    postMessage({});
  } else {
    obey(data);
  }
};
