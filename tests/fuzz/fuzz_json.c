/* SPDX-License-Identifier: MIT */
/*
 * Random texts through the JSON reader. What must hold: no crash, nothing leaked, a refusal has a sentence, and what is
 * accepted, written again by the JSON writer, is accepted again and gives the same tree.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "files/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_json: %s\n", what);
    abort();
}

static void write_value(json_writer *w, const json_value *v) {
    switch (v->type) {
    case JSON_NULL: json_put_null(w, v->key); break;
    case JSON_BOOLEAN: json_put_boolean(w, v->key, v->boolean); break;
    case JSON_STRING: json_put_text(w, v->key, v->text); break;
    case JSON_NUMBER:
        if (v->exact)
            json_put_integer(w, v->key, v->integer);
        else
            json_put_real(w, v->key, v->number);
        break;
    case JSON_ARRAY:
    case JSON_OBJECT:
        (v->type == JSON_ARRAY ? json_put_array : json_put_object)(w, v->key);
        for (const json_value *e = v->first; e; e = e->next)
            write_value(w, e);
        (v->type == JSON_ARRAY ? json_put_array_end : json_put_object_end)(w);
        break;
    }
}

static void compare(const json_value *a, const json_value *b) {
    require(a->type == b->type, "another value was read back");
    require(!a->key == !b->key && (!a->key || strcmp(a->key, b->key) == 0), "another key was read back");
    require(a->boolean == b->boolean && a->exact == b->exact, "another value was read back");
    require(a->type != JSON_NUMBER || (a->integer == b->integer && a->number == b->number),
            "another number was read back");
    require(a->type != JSON_STRING || strcmp(a->text, b->text) == 0, "another text was read back");
    if (a->type != JSON_ARRAY && a->type != JSON_OBJECT) return;
    size_t count = 0;
    const json_value *x = a->first, *y = b->first;
    for (; x && y; x = x->next, y = y->next, count++) {
        require(a->type != JSON_OBJECT || json_member(a, x->key) == x, "a member that its own key does not find");
        compare(x, y);
    }
    require(!x && !y && count == a->count && count == b->count, "a list whose count is wrong");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_document document, again;
    char error[FILE_ERROR] = "";
    if (json_parse((const char *)data, size, &document, error)) {
        json_writer w = {.indented = size % 2};
        write_value(&w, document.root);
        char *text = json_take(&w);
        require(text && json_parse(text, strlen(text), &again, error), "what was written is refused");
        compare(document.root, again.root);
        json_free(&again);
        free(text);
    } else {
        require(*error != 0, "refused without a sentence");
    }
    json_free(&document);
    return 0;
}
