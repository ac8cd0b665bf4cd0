// SPDX-License-Identifier: MIT
// Turns the formulas of docs/ops/*.md into MathML, which browsers draw themselves. The docs write TeX; this reads the
// part of TeX that they use. A command that is not in the tables throws, so that a page with a new one fails its test
// instead of showing a wrong formula.

const LETTERS = {
    alpha: 'α', beta: 'β', gamma: 'γ', delta: 'δ', varepsilon: 'ε', theta: 'θ', lambda: 'λ', mu: 'μ', pi: 'π',
    sigma: 'σ', varphi: 'φ', Phi: 'Φ', ell: 'ℓ', partial: '∂', infty: '∞',
};
const OPERATORS = {
    cdot: '·', odot: '⊙', approx: '≈', le: '≤', ge: '≥', in: '∈', to: '→', ldots: '…', langle: '⟨', rangle: '⟩',
    lfloor: '⌊', rfloor: '⌋', lvert: '|', rvert: '|', times: '×', neq: '≠', pm: '±',
};
const FUNCTIONS = ['log', 'sin', 'cos', 'tanh', 'max', 'min', 'gcd', 'exp'];
const SPACES = {',': '0.17em', ' ': '0.25em', quad: '1em', qquad: '2em', ';': '0.28em'};
const FENCES = {pmatrix: ['(', ')'], cases: ['{', ''], aligned: ['', '']};

const escape = (text) => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
const row = (items) => (items.length === 1 ? items[0] : `<mrow>${items.join('')}</mrow>`);

function tokens(tex) {
    return tex.match(/\\(?:text|mathrm|begin|end)\{[^}]*\}|\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|[a-zA-Z]+|\S/g) || [];
}

class Reader {
    constructor(tex) {
        this.list = tokens(tex);
        this.at = 0;
    }
    peek() {
        return this.list[this.at];
    }
    next() {
        if (this.at >= this.list.length) throw new Error('a formula ends too early');
        return this.list[this.at++];
    }
    group() {
        const first = this.peek() || '';
        if (/^[a-zA-Z0-9]{2,}$/.test(first)) { // x_ab is x_a b
            this.list.splice(this.at, 1, first[0], first.slice(1));
            return this.atom();
        }
        if (first !== '{') return this.atom();
        this.next();
        const items = this.items((t) => t === '}');
        this.next();
        return row(items);
    }
    items(ends) {
        const list = [];
        while (this.at < this.list.length && !ends(this.peek())) list.push(this.scripted());
        return list;
    }
    /* An atom with its subscript and superscript; those of a sum stand below and above it. */
    scripted() {
        const big = this.peek() === '\\sum';
        const base = this.atom();
        let below = null, above = null;
        for (;;) {
            if (this.peek() === '_') {
                this.next();
                below = this.group();
            } else if (this.peek() === '^') {
                this.next();
                above = this.group();
            } else if (this.peek() === "'") {
                this.next();
                above = '<mo>′</mo>';
            } else {
                break;
            }
        }
        const [under, over, both] = big ? ['munder', 'mover', 'munderover'] : ['msub', 'msup', 'msubsup'];
        if (below && above) return `<${both}>${base}${below}${above}</${both}>`;
        if (below) return `<${under}>${base}${below}</${under}>`;
        if (above) return `<${over}>${base}${above}</${over}>`;
        return base;
    }
    fenced() {
        const open = this.delimiter();
        const items = this.items((t) => t === '\\right');
        this.next();
        const close = this.delimiter();
        return `<mrow>${open}${items.join('')}${close}</mrow>`;
    }
    delimiter() {
        const t = this.next();
        if (t === '.') return '';
        return `<mo stretchy="true">${escape(OPERATORS[t.slice(1)] || t.replace('\\', ''))}</mo>`;
    }
    table(kind) {
        if (!FENCES[kind]) throw new Error(`unknown environment ${kind} in a formula`);
        const rows = [[]];
        const ends = (t) => t === '&' || t === '\\\\' || t.startsWith('\\end{');
        for (let end = '&'; end === '&' || end === '\\\\';) {
            rows[rows.length - 1].push(`<mtd>${row(this.items(ends))}</mtd>`);
            end = this.next();
            if (end === '\\\\') rows.push([]);
        }
        const body = rows.map((cells) => `<mtr>${cells.join('')}</mtr>`).join('');
        const [open, close] = FENCES[kind].map((fence) => `<mo stretchy="true">${fence}</mo>`);
        return `<mrow>${open}<mtable>${body}</mtable>${close}</mrow>`;
    }
    atom() {
        const t = this.next();
        if (t === '{') {
            this.at--;
            return this.group();
        }
        if (/^[0-9]/.test(t)) return `<mn>${t}</mn>`;
        if (/^[a-zA-Z]/.test(t)) return `<mi>${t}</mi>`;
        if (t[0] !== '\\') return `<mo stretchy="false">${escape(t === '-' ? '−' : t)}</mo>`;
        const braced = /^\\([a-z]+)\{([^}]*)\}$/.exec(t);
        if (braced && braced[1] === 'begin') return this.table(braced[2]);
        if (braced) return `<mtext>${escape(braced[2])}</mtext>`;
        const name = t.slice(1);
        if (LETTERS[name]) return `<mi>${LETTERS[name]}</mi>`;
        if (OPERATORS[name]) return `<mo stretchy="false">${OPERATORS[name]}</mo>`;
        if (SPACES[name]) return `<mspace width="${SPACES[name]}"></mspace>`;
        if (FUNCTIONS.includes(name)) return `<mrow><mi>${name}</mi><mspace width="0.1em"></mspace></mrow>`;
        if (name === 'sum') return '<mo>∑</mo>';
        if (name === 'frac') return `<mfrac>${this.group()}${this.group()}</mfrac>`;
        if (name === 'sqrt') return `<msqrt>${this.group()}</msqrt>`;
        if (name === 'hat') return `<mover accent="true">${this.group()}<mo>^</mo></mover>`;
        if (name === 'mathbf') return `<mstyle style="font-weight:bold">${this.group()}</mstyle>`;
        if (name === 'left') return this.fenced();
        if (name === 'Big') return this.delimiter();
        if (name.length === 1) return `<mo stretchy="false">${escape(name)}</mo>`;
        throw new Error(`unknown command \\${name} in a formula`);
    }
}

/* The MathML of a formula; `block`: on a line of its own. */
export function formula(tex, block) {
    const reader = new Reader(tex);
    const items = reader.items(() => false);
    return `<math${block ? ' display="block"' : ''}><mrow>${items.join('')}</mrow></math>`;
}

/* The HTML of a paragraph of docs: `code`, *emphasis*, [links](x) as their text, $formulas$. */
function inline(text) {
    return text.split(/(\$[^$]+\$|`[^`]+`)/).map((part) => {
        if (part.length > 2 && part[0] === '$') return formula(part.slice(1, -1), false);
        if (part.length > 2 && part[0] === '`') return `<code>${escape(part.slice(1, -1))}</code>`;
        return escape(part)
            .replace(/\[([^\]]*)\]\([^)]*\)/g, '$1')
            .replace(/\*\*([^*]+)\*\*/g, '<strong>$1</strong>')
            .replace(/\*([^*]+)\*/g, '<em>$1</em>');
    }).join('');
}

/* The HTML of the prose and formulas of a docs page. */
export function prose(markdown) {
    const parts = markdown.split(/(\$\$[\s\S]+?\$\$)/);
    return parts.map((part) => {
        if (part.startsWith('$$')) return `<div class="formula" tabindex="0">${formula(part.slice(2, -2), true)}</div>`;
        return part.split(/\n\s*\n/).filter((p) => p.trim()).map((p) => {
            if (p.trim().startsWith('## ')) return `<h4>${inline(p.trim().slice(3))}</h4>`;
            if (p.trim().startsWith('- ')) {
                const items = p.trim().slice(2).split(/\n- /);
                return `<ul>${items.map((i) => `<li>${inline(i)}</li>`).join('')}</ul>`;
            }
            if (p.trim().startsWith('|')) return '';
            return `<p>${inline(p.trim())}</p>`;
        }).join('');
    }).join('');
}
