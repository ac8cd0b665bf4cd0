// SPDX-License-Identifier: MIT
// A thread of the module: a worker with an instance of its own on the common memory. It is given a stack and
// thread-local variables, and then waits inside the module for work.
import {threadCalls} from './wasi.js';

onmessage = async ({data: {module, memory, number, stack, local}}) => {
  try {
    const imports = {env: {memory}, wasi_snapshot_preview1: threadCalls(memory), vjp: {row() {}, gpu: () => 0}};
    const {exports} = await WebAssembly.instantiate(module, imports);
    exports.__stack_pointer.value = stack;
    exports.__wasm_init_tls(local);
    postMessage({});
    exports.vjp_web_worker(number);
  } catch (error) {
    postMessage({error: String(error)});
  }
};
