// SPDX-License-Identifier: MIT
// What tests in a browser require.

export function expect(condition, sentence) {
  if (!condition) throw new Error(sentence);
}

/** The call must throw an Error whose message has that part; returns the message. */
export function throws(call, part) {
  try {
    call();
  } catch (error) {
    expect(error.message.includes(part), `"${error.message}" does not say "${part}"`);
    return error.message;
  }
  throw new Error(`nothing was thrown that says "${part}"`);
}
