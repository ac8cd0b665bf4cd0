// SPDX-License-Identifier: MIT
// The saved run, in the origin private file system: what a reload continues from. Runs in a worker.
//
// There are two slots, written in turn, so that a tab that is closed while it writes leaves the older one whole. A slot
// is: "vjprun" and a version, the bytes of the header, the header (JSON: a counter, the names and sizes of the
// files), the files, and "whole" at the end. The newest whole slot is the one that is read.

const MAGIC = 'vjprun01', END = 'vjpwhole', NUMBER = 8;
const HELD = ['NoModificationAllowedError', 'InvalidStateError'];
const encoder = new TextEncoder(), decoder = new TextDecoder();

/* A page that is reloaded may still hold the file for a moment. */
async function hold(handle) {
    for (let tries = 15;; tries--) {
        try {
            return await handle.createSyncAccessHandle();
        } catch (error) {
            if (!tries || !HELD.includes(error.name)) throw error;
            await new Promise((resolve) => setTimeout(resolve, 100));
        }
    }
}

export class Store {
    /* Opens both slots; throws where the browser has no such storage, or another tab holds it. */
    static async open() {
        if (!navigator.storage || !navigator.storage.getDirectory)
            throw new Error('This browser has no private file system for pages: a reload begins again.');
        const store = new Store();
        store.slots = [];
        store.counter = 0;
        try {
            const folder = await navigator.storage.getDirectory();
            for (const name of ['run-a', 'run-b']) {
                const handle = await folder.getFileHandle(name, {create: true});
                store.slots.push(await hold(handle));
            }
        } catch (error) {
            store.close();
            throw new Error(HELD.includes(error.name)
                ? 'Another tab has this page open and keeps the saved run: this one does not save.'
                : `The browser refused its private file system (${error.message}): a reload begins again.`);
        }
        return store;
    }
    close() {
        for (const slot of this.slots) slot.close();
        this.slots = [];
    }
    static header(slot) {
        const fixed = new Uint8Array(MAGIC.length + NUMBER), size = slot.getSize();
        if (size < fixed.length || slot.read(fixed, {at: 0}) !== fixed.length) return null;
        if (decoder.decode(fixed.subarray(0, MAGIC.length)) !== MAGIC) return null;
        const bytes = Number(new DataView(fixed.buffer).getBigUint64(MAGIC.length, true));
        if (bytes > size - fixed.length) return null;
        const text = new Uint8Array(bytes);
        slot.read(text, {at: fixed.length});
        let header;
        try {
            header = JSON.parse(decoder.decode(text));
        } catch {
            return null;
        }
        header.at = fixed.length + bytes;
        const end = new Uint8Array(END.length), parts = header.parts.reduce((sum, p) => sum + p[1], 0);
        if (header.at + parts + END.length !== size) return null;
        slot.read(end, {at: size - END.length});
        return decoder.decode(end) === END ? header : null;
    }
    /* The files as saved last, a Map from name to bytes, or null. */
    load() {
        let best = null;
        for (const slot of this.slots) {
            const header = Store.header(slot);
            if (header && (!best || header.counter > best.header.counter)) best = {slot, header};
        }
        if (!best) return null;
        this.counter = best.header.counter;
        const files = new Map();
        let at = best.header.at;
        for (const [name, bytes] of best.header.parts) {
            const part = new Uint8Array(bytes);
            best.slot.read(part, {at});
            files.set(name, part);
            at += bytes;
        }
        return files;
    }
    save(files) {
        const slot = this.slots[++this.counter % 2];
        const parts = [...files].map(([name, bytes]) => [name, bytes.length]);
        const header = encoder.encode(JSON.stringify({counter: this.counter, parts}));
        const fixed = new Uint8Array(MAGIC.length + NUMBER);
        fixed.set(encoder.encode(MAGIC));
        new DataView(fixed.buffer).setBigUint64(MAGIC.length, BigInt(header.length), true);
        slot.truncate(0);
        let at = 0;
        for (const part of [fixed, header, ...files.values(), encoder.encode(END)]) {
            if (slot.write(part, {at}) !== part.length) throw new Error('The browser has no room left to save the run.');
            at += part.length;
        }
        slot.flush();
        return at;
    }
    forget() {
        for (const slot of this.slots) {
            slot.truncate(0);
            slot.flush();
        }
    }
}
