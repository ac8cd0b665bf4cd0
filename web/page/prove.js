// SPDX-License-Identifier: MIT
// "Prove it": shows the rows of `vjp check` as they come from the worker prover.js, and owns that worker. It is started
// when it is first needed: the model comes first.

const $ = (id) => document.getElementById(id);

export class Prove {
    constructor() {
        this.worker = null;
        this.ready = null;
        this.waiting = new Map(); // kind of a message to what listens for it
        this.rows = new Map();
        $('check').addEventListener('click', () => this.checkAll());
        $('break').addEventListener('click', () => this.breakOne($('break-op').value));
        $('check-stop').addEventListener('click', () => this.stop('Stopped.'));
    }
    /* Resolves with the op table once the module is there. */
    start() {
        if (this.ready) return this.ready;
        this.worker = new Worker('prover.js', {type: 'module'});
        this.ready = new Promise((resolve, reject) => {
            this.on('loaded', (m) => resolve(m.ops));
            this.worker.onerror = (event) => reject(new Error(event.message || 'the worker could not be loaded'));
            this.worker.onmessage = ({data}) => {
                if (data.kind === 'failed' && data.during === 'load') reject(new Error(data.sentence));
                const hears = this.waiting.get(data.kind);
                if (hears) hears(data);
            };
        });
        this.on('checking', (m) => this.checking(m.op));
        this.on('row', (m) => this.row(m.op, m.row));
        this.on('checked', (m) => this.checked(m));
        this.on('proved', (m) => this.proved(m));
        this.on('broken', (m) => this.broken(m));
        this.worker.postMessage({kind: 'load', threads: 1});
        return this.ready;
    }
    on(kind, hears) {
        this.waiting.set(kind, hears);
    }
    post(message) {
        this.worker.postMessage(message);
    }
    busy(is) {
        $('check').disabled = $('break').disabled = is;
        $('check-stop').hidden = !is;
    }
    clear() {
        this.rows.clear();
        this.passed = this.wrong = 0;
        $('checks').tBodies[0].replaceChildren();
        $('checks').hidden = false;
        this.busy(true);
        $('check-status').className = '';
    }
    async checkAll() {
        this.clear();
        $('check-status').textContent = 'Loading a module for the checks';
        try {
            const ops = await this.start();
            this.post({kind: 'check', ops: ops.map((op) => op.name)});
        } catch (error) {
            this.stop(error.message);
        }
    }
    async breakOne(op) {
        this.clear();
        $('check-status').textContent = `Checking ${op} with one number of its result damaged`;
        try {
            await this.start();
            this.post({kind: 'break', op});
        } catch (error) {
            this.stop(error.message);
        }
    }
    checking(op) {
        const row = $('checks').tBodies[0].insertRow(0);
        const head = document.createElement('th');
        head.scope = 'row';
        head.textContent = op;
        row.append(head);
        const cells = [0, 1, 2].map(() => row.insertCell());
        cells[2].className = 'wide';
        this.rows.set(op, {cells, ok: 0, failed: 0, drawn: 0});
    }
    /* A line of the check; {ok, text}. Lines come by the thousand, so that only some are drawn; failures all are. */
    row(op, line) {
        const at = this.rows.get(op);
        if (line.ok) at.ok++;
        else at.failed++;
        this.passed += line.ok ? 1 : 0;
        this.wrong += line.ok ? 0 : 1;
        const now = performance.now();
        if (line.ok && now - at.drawn < 60) return;
        at.drawn = now;
        if (!at.failed || !line.ok) at.cells[2].textContent = line.text;
        this.counts(at);
    }
    counts(at) {
        at.cells[0].textContent = at.ok.toLocaleString('en');
        at.cells[1].textContent = at.failed ? at.failed.toLocaleString('en') : '0';
        at.cells[1].className = at.failed ? 'bad' : '';
        $('check-status').textContent = `${this.passed.toLocaleString('en')} passed, ${this.wrong.toLocaleString('en')} failed`;
    }
    checked({op, ok, failed}) {
        const at = this.rows.get(op);
        this.passed += ok - at.ok;
        this.wrong += failed - at.failed;
        [at.ok, at.failed] = [ok, failed];
        this.counts(at);
        at.cells[0].classList.toggle('good', !failed);
    }
    proved({seconds, failed}) {
        this.busy(false);
        $('check-status').className = failed ? 'bad' : 'good';
        $('check-status').textContent = `${this.passed.toLocaleString('en')} checks passed, ${failed.toLocaleString('en')} failed, in ${seconds.toFixed(1)} s.`;
    }
    broken({op, failed, ok}) {
        this.busy(false);
        $('check-status').className = failed ? 'good' : 'bad';
        $('check-status').textContent = failed
            ? `Caught: with one number of ${op} damaged, ${failed.toLocaleString('en')} of ${(ok + failed).toLocaleString('en')} checks failed.`
            : `Not caught: ${op} was damaged and ${ok.toLocaleString('en')} checks passed.`;
    }
    stop(sentence) {
        if (this.worker) this.worker.terminate();
        this.worker = this.ready = null;
        this.busy(false);
        $('check-status').textContent = sentence;
    }
}
