// SPDX-License-Identifier: MIT
// What the module needs of a system (WASI preview 1): a clock, output, and files that are in memory.
//
// Files is a tree of folders and files, which the page fills and reads; systemCalls() makes the imports of a module that
// works on it. A thread of the module has no files: threadCalls() has the clock alone.

const OK = 0, BAD_FILE = 8, EXISTS = 20, INVALID = 28, IS_FOLDER = 31, NO_ENTRY = 44, NO_SYSTEM_CALL = 52;
const NOT_FOLDER = 54, NOT_EMPTY = 55, NOT_SUPPORTED = 58;
const FOLDER = 3, FILE = 4, TERMINAL = 2; // file types
const ROOT = 3; // the file number of the folder "/"

/** A tree of files in memory. Paths are "/run/metrics.jsonl"; the first slash may be left out. */
export class Files {
  #root = {folder: new Map(), number: 1};
  #count = 1;

  /** The file or folder at a path; undefined if there is none. */
  find(path) {
    let at = this.#root;
    for (const name of parts(path)) {
      at = at?.folder?.get(name);
    }
    return at;
  }

  /** The folder that holds a path, and the path's last name. */
  parent(path) {
    const names = parts(path), name = names.pop();
    return {folder: this.find(names.join('/'))?.folder, name};
  }

  create(path, isFolder) {
    const {folder, name} = this.parent(path);
    if (!folder || name === undefined) return undefined;
    const made = isFolder ? {folder: new Map()} : {bytes: new Uint8Array(0), size: 0};
    made.number = ++this.#count;
    folder.set(name, made);
    return made;
  }

  /** Writes a file, and makes the folders above it. */
  write(path, bytes) {
    const names = parts(path);
    for (let i = 1; i < names.length; i++) {
      const above = names.slice(0, i).join('/');
      if (!this.find(above)) this.create(above, true);
    }
    const file = this.create(path, false);
    if (!file) throw new Error(`${path}: a file is where a folder should be`);
    file.bytes = bytes.slice();
    file.size = bytes.length;
  }

  /** The bytes of a file; undefined if there is none. */
  read(path) {
    const file = this.find(path);
    return file?.bytes?.slice(0, file.size);
  }

  /** The paths of all files below a folder, relative to it, sorted. */
  list(path) {
    const found = [];
    const visit = (folder, before) => {
      for (const [name, node] of folder) {
        if (node.folder) visit(node.folder, before + name + '/');
        else found.push(before + name);
      }
    };
    const at = this.find(path);
    if (at?.folder) visit(at.folder, '');
    return found.sort();
  }

  remove(path) {
    const {folder, name} = this.parent(path);
    return folder?.delete(name) ?? false;
  }
}

function parts(path) {
  return path.split('/').filter(name => name && name !== '.');
}

/** The clock of a thread; all else fails. `memory`: of the module. */
export function threadCalls(memory) {
  return fallBack({
    clock_time_get: clockOf(memory),
    sched_yield: () => OK,
  });
}

/** The system call that writes the time in nanoseconds. A step makes two per op, so it makes no BigInt and no view. */
function clockOf(memory) {
  let view = new DataView(memory.buffer);
  return (id, precision, at) => {
    const time = Math.round((id === 0 ? Date.now() : performance.now()) * 1e6); // 0: the time of day
    if (view.buffer !== memory.buffer) view = new DataView(memory.buffer); // it has grown
    view.setUint32(at, time % 2 ** 32, true);
    view.setUint32(at + 4, time / 2 ** 32, true);
    return OK;
  };
}

function fallBack(calls) {
  return new Proxy(calls, {get: (from, name) => from[name] ?? (() => NO_SYSTEM_CALL)});
}

/** The imports of a module. `print(text, isError)` gets what it writes to its standard streams. */
export function systemCalls(memory, files, print) {
  const view = () => new DataView(memory.buffer);
  const bytes = (at, length) => new Uint8Array(memory.buffer, at, length);
  const text = (at, length) => new TextDecoder().decode(bytes(at, length).slice()); // no decoder takes shared memory
  const open = [null, null, null, {node: files.find('/'), path: ''}];
  const decoders = [null, new TextDecoder(), new TextDecoder()];

  const folderPath = (fd, at, length) => {
    const base = open[fd];
    return base?.node.folder ? base.path + '/' + text(at, length) : undefined;
  };
  const chunks = (vectors, count) => {
    const found = [], v = view();
    for (let i = 0; i < count; i++)
      found.push(bytes(v.getUint32(vectors + 8 * i, true), v.getUint32(vectors + 8 * i + 4, true)));
    return found;
  };
  const readAt = (file, position, vectors, count) => {
    let total = 0;
    for (const chunk of chunks(vectors, count)) {
      const from = file.bytes.subarray(Math.min(position + total, file.size),
                                       Math.min(position + total + chunk.length, file.size));
      chunk.set(from);
      total += from.length;
      if (from.length < chunk.length) break;
    }
    return total;
  };
  const writeAt = (file, position, vectors, count) => {
    let total = 0;
    for (const chunk of chunks(vectors, count)) {
      const end = position + total + chunk.length;
      resize(file, Math.max(end, file.size));
      file.bytes.set(chunk, position + total);
      total += chunk.length;
    }
    return total;
  };
  const putStatus = (node, at) => {
    const v = view();
    bytes(at, 64).fill(0);
    v.setBigUint64(at, 1n, true);
    v.setBigUint64(at + 8, BigInt(node.number), true);
    v.setUint8(at + 16, node.folder ? FOLDER : FILE);
    v.setBigUint64(at + 24, 1n, true);
    v.setBigUint64(at + 32, BigInt(node.size ?? 0), true);
    return OK;
  };
  const putCount = (at, count) => {
    view().setUint32(at, count, true);
    return OK;
  };

  return fallBack({
    args_sizes_get: (count, size) => putCount(count, 0) || putCount(size, 0),
    args_get: () => OK,
    environ_sizes_get: (count, size) => putCount(count, 0) || putCount(size, 0),
    environ_get: () => OK,
    clock_res_get(id, at) {
      view().setBigUint64(at, 5000n, true);
      return OK;
    },
    clock_time_get: clockOf(memory),
    random_get(at, length) {
      bytes(at, length).set(crypto.getRandomValues(new Uint8Array(length)));
      return OK;
    },
    sched_yield: () => OK,
    proc_exit(status) {
      throw new Error(`the module ended with status ${status}`);
    },

    fd_prestat_get(fd, at) {
      if (fd !== ROOT) return BAD_FILE;
      view().setUint32(at, 0, true);
      view().setUint32(at + 4, 1, true);
      return OK;
    },
    fd_prestat_dir_name(fd, at) {
      bytes(at, 1)[0] = '/'.charCodeAt(0);
      return OK;
    },
    fd_fdstat_get(fd, at) {
      if (fd > 2 && !open[fd]) return BAD_FILE;
      bytes(at, 24).fill(0);
      view().setUint8(at, fd < 3 ? TERMINAL : open[fd].node.folder ? FOLDER : FILE);
      view().setUint16(at + 2, open[fd]?.appends ? 1 : 0, true);
      bytes(at + 8, 16).fill(255);
      return OK;
    },
    fd_fdstat_set_flags: () => OK,
    fd_filestat_get: (fd, at) => open[fd] ? putStatus(open[fd].node, at) : BAD_FILE,
    fd_filestat_set_size(fd, size) {
      if (!open[fd]?.node.bytes) return BAD_FILE;
      resize(open[fd].node, Number(size));
      return OK;
    },
    fd_sync: () => OK,
    fd_datasync: () => OK,
    fd_advise: () => OK,
    fd_close(fd) {
      if (!open[fd] || fd <= ROOT) return BAD_FILE;
      open[fd] = null;
      return OK;
    },
    fd_seek(fd, offset, from, at) {
      const file = open[fd];
      if (!file?.node.bytes) return fd < 3 ? 70 : BAD_FILE; // 70: a stream
      const position = Number(offset) + (from === 0 ? 0 : from === 1 ? file.position : file.node.size);
      if (position < 0) return INVALID;
      file.position = position;
      view().setBigUint64(at, BigInt(position), true);
      return OK;
    },
    fd_tell(fd, at) {
      if (!open[fd]?.node.bytes) return BAD_FILE;
      view().setBigUint64(at, BigInt(open[fd].position), true);
      return OK;
    },
    fd_read(fd, vectors, count, at) {
      const file = open[fd];
      if (!file) return fd === 0 ? putCount(at, 0) : BAD_FILE;
      if (file.node.folder) return IS_FOLDER;
      const total = readAt(file.node, file.position, vectors, count);
      file.position += total;
      return putCount(at, total);
    },
    fd_pread(fd, vectors, count, offset, at) {
      if (!open[fd]?.node.bytes) return BAD_FILE;
      return putCount(at, readAt(open[fd].node, Number(offset), vectors, count));
    },
    fd_write(fd, vectors, count, at) {
      if (fd === 1 || fd === 2) {
        let total = 0;
        for (const chunk of chunks(vectors, count)) {
          print(decoders[fd].decode(chunk.slice(), {stream: true}), fd === 2);
          total += chunk.length;
        }
        return putCount(at, total);
      }
      const file = open[fd];
      if (!file?.node.bytes) return BAD_FILE;
      if (file.appends) file.position = file.node.size;
      const total = writeAt(file.node, file.position, vectors, count);
      file.position += total;
      return putCount(at, total);
    },
    fd_pwrite(fd, vectors, count, offset, at) {
      if (!open[fd]?.node.bytes) return BAD_FILE;
      return putCount(at, writeAt(open[fd].node, Number(offset), vectors, count));
    },
    fd_readdir(fd, at, room, cookie, used) {
      if (!open[fd]?.node.folder) return NOT_FOLDER;
      const entries = [['.', open[fd].node], ['..', open[fd].node], ...open[fd].node.folder];
      let filled = 0;
      for (let i = Number(cookie); i < entries.length && filled < room; i++) {
        const [name, node] = entries[i], encoded = new TextEncoder().encode(name);
        const entry = new Uint8Array(24 + encoded.length), v = new DataView(entry.buffer);
        v.setBigUint64(0, BigInt(i + 1), true);
        v.setBigUint64(8, BigInt(node.number), true);
        v.setUint32(16, encoded.length, true);
        v.setUint8(20, node.folder ? FOLDER : FILE);
        entry.set(encoded, 24);
        const part = entry.subarray(0, room - filled); // the last one may be cut off: it is asked for again
        bytes(at + filled, part.length).set(part);
        filled += part.length;
      }
      return putCount(used, filled);
    },

    path_open(fd, follow, at, length, how, rights, inherited, flags, result) {
      const path = folderPath(fd, at, length);
      if (path === undefined) return BAD_FILE;
      const creates = how & 1, needsFolder = how & 2, exclusive = how & 4, truncates = how & 8;
      let node = files.find(path);
      if (node && creates && exclusive) return EXISTS;
      if (node && needsFolder && !node.folder) return NOT_FOLDER;
      if (!node && !creates) return NO_ENTRY;
      node ??= files.create(path, false);
      if (!node) return NO_ENTRY;
      if (truncates && node.bytes) resize(node, 0);
      let number = ROOT + 1;
      while (open[number]) number++;
      open[number] = {node, path: '/' + parts(path).join('/'), position: 0, appends: (flags & 1) !== 0};
      return putCount(result, number);
    },
    path_filestat_get(fd, follow, at, length, status) {
      const path = folderPath(fd, at, length), node = path === undefined ? undefined : files.find(path);
      return node ? putStatus(node, status) : NO_ENTRY;
    },
    path_create_directory(fd, at, length) {
      const path = folderPath(fd, at, length);
      if (files.find(path)) return EXISTS;
      return files.create(path, true) ? OK : NO_ENTRY;
    },
    path_remove_directory(fd, at, length) {
      const path = folderPath(fd, at, length), node = files.find(path);
      if (!node) return NO_ENTRY;
      if (!node.folder) return NOT_FOLDER;
      if (node.folder.size) return NOT_EMPTY;
      files.remove(path);
      return OK;
    },
    path_unlink_file(fd, at, length) {
      const path = folderPath(fd, at, length), node = files.find(path);
      if (!node) return NO_ENTRY;
      if (node.folder) return IS_FOLDER;
      files.remove(path);
      return OK;
    },
    path_rename(fromFd, from, fromLength, toFd, to, toLength) {
      const one = folderPath(fromFd, from, fromLength), other = folderPath(toFd, to, toLength);
      const node = files.find(one), taken = files.find(other), {folder, name} = files.parent(other);
      if (!node || !folder) return NO_ENTRY;
      if (taken === node) return OK;
      if (taken?.folder && !node.folder) return IS_FOLDER;
      if (taken && !taken.folder && node.folder) return NOT_FOLDER;
      if (taken?.folder?.size) return NOT_EMPTY;
      files.remove(one);
      folder.set(name, node);
      return OK;
    },
    path_readlink: () => INVALID,
    path_symlink: () => NOT_SUPPORTED,
  });
}

// Grows in steps of a half, so that a file that is written in small pieces is not copied for each of them.
function resize(file, size) {
  if (size > file.bytes.length) {
    const larger = new Uint8Array(Math.max(size, Math.ceil(file.bytes.length * 1.5)));
    larger.set(file.bytes.subarray(0, file.size));
    file.bytes = larger;
  } else if (size < file.size) {
    file.bytes.fill(0, size, file.size);
  }
  file.size = size;
}
