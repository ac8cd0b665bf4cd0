// SPDX-License-Identifier: MIT
// Zip archives of files in memory, without compression: weights do not compress.

const LOCAL = 0x04034b50, CENTRAL = 0x02014b50, END = 0x06054b50;

const table = new Uint32Array(256).map((_, i) => {
  for (let bit = 0; bit < 8; bit++) i = i & 1 ? 0xedb88320 ^ (i >>> 1) : i >>> 1;
  return i;
});

function checksum(bytes) {
  let sum = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) sum = table[(sum ^ bytes[i]) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

/** The archive of a Map from path to Uint8Array. Its bytes depend on the files alone: it holds no times. */
export function zip(files) {
  const pieces = [], index = [];
  let offset = 0;
  const add = piece => { pieces.push(piece); offset += piece.length; };
  for (const [path, bytes] of files) {
    const name = new TextEncoder().encode(path);
    const entry = new DataView(new ArrayBuffer(26)); // what both headers share
    entry.setUint16(0, 20, true);                    // version 2.0
    entry.setUint16(2, 0x800, true);                 // the name is UTF-8
    entry.setUint16(8, 0x21, true);                  // 1980-01-01
    entry.setUint32(10, checksum(bytes), true);
    entry.setUint32(14, bytes.length, true);
    entry.setUint32(18, bytes.length, true);
    entry.setUint16(22, name.length, true);
    index.push({name, entry, offset});
    add(number(LOCAL));
    add(new Uint8Array(entry.buffer));
    add(name);
    add(bytes);
  }
  const start = offset;
  for (const {name, entry, offset: at} of index) {
    const rest = new DataView(new ArrayBuffer(14));
    rest.setUint32(10, at, true);
    add(number(CENTRAL));
    add(new Uint8Array([20, 0]));
    add(new Uint8Array(entry.buffer));
    add(new Uint8Array(rest.buffer, 0, 14));
    add(name);
  }
  const end = new DataView(new ArrayBuffer(22));
  end.setUint32(0, END, true);
  end.setUint16(8, index.length, true);
  end.setUint16(10, index.length, true);
  end.setUint32(12, offset - start, true);
  end.setUint32(16, start, true);
  add(new Uint8Array(end.buffer));
  if (offset >= 2 ** 32 || index.length >= 2 ** 16) throw new Error('zip: the files are too large for one archive');
  const archive = new Uint8Array(offset);
  let at = 0;
  for (const piece of pieces) {
    archive.set(piece, at);
    at += piece.length;
  }
  return archive;
}

function number(value) {
  return new Uint8Array([value, value >> 8, value >> 16, value >> 24]);
}

/** The files of an archive, as a Map from path to Uint8Array; folders are left out. Throws if the archive is damaged. */
export function unzip(bytes) {
  const v = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && v.getUint32(end, true) !== END) end--;
  if (end < 0) throw new Error('unzip: this is not a zip archive');
  const files = new Map();
  const count = v.getUint16(end + 10, true);
  let at = v.getUint32(end + 16, true);
  for (let i = 0; i < count; i++) {
    if (at + 46 > bytes.length || v.getUint32(at, true) !== CENTRAL) throw new Error('unzip: the archive is damaged');
    const method = v.getUint16(at + 10, true), sum = v.getUint32(at + 16, true);
    const packed = v.getUint32(at + 20, true), size = v.getUint32(at + 24, true);
    const nameLength = v.getUint16(at + 28, true), local = v.getUint32(at + 42, true);
    const name = new TextDecoder().decode(bytes.slice(at + 46, at + 46 + nameLength));
    at += 46 + nameLength + v.getUint16(at + 30, true) + v.getUint16(at + 32, true);
    if (name.endsWith('/')) continue;
    if (local + 30 > bytes.length || v.getUint32(local, true) !== LOCAL) throw new Error('unzip: the archive is damaged');
    const begin = local + 30 + v.getUint16(local + 26, true) + v.getUint16(local + 28, true);
    const content = bytes.slice(begin, begin + packed);
    if (method !== 0) throw new Error(`unzip: ${name} is compressed; make the archive without compression (zip -0)`);
    if (content.length !== size || checksum(content) !== sum) throw new Error(`unzip: ${name} is damaged`);
    files.set(name, content);
  }
  return files;
}
