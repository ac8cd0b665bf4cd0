/* SPDX-License-Identifier: MIT */
/* The module (module.h): failures, devices, and the table of ops as JSON. */
#include "module.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Failing ----------------------------------------------------------------------------------------- */

static char sentence[WEB_ERROR];

bool web_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return false;
}

char *web_take(json_writer *w) {
    char *text = json_take(w);
    if (!text) web_fail("out of memory");
    return text;
}

const char *vjp_web_error(void);
WEB_EXPORT(vjp_web_error) const char *vjp_web_error(void) {
    return sentence;
}

/* ---- Devices ----------------------------------------------------------------------------------------- */

/* `threads` 0: as many as there are workers, and the caller. */
vjp_device *vjp_web_open(const char *name, int threads);
WEB_EXPORT(vjp_web_open) vjp_device *vjp_web_open(const char *name, int threads) {
    /* Reserved when it is needed: a page that calls small ops should not have 128 MiB. */
    vjp_options options = {.struct_size = sizeof options, .threads = threads, .workspace_bytes = 1 << 20};
    vjp_device *device;
    if (vjp_open(name, &options, &device) == VJP_OK) return device;
    web_fail("%s", device ? vjp_error(device) : "out of memory");
    vjp_close(device);
    return NULL;
}

/* "instruction_set", "threads"; "" where the device has no such thing. */
const char *vjp_web_property(vjp_device *device, const char *name);
WEB_EXPORT(vjp_web_property) const char *vjp_web_property(vjp_device *device, const char *name) {
    static char text[64];
    if (vjp_device_property(device, name, text, sizeof text) != VJP_OK) text[0] = 0;
    return text;
}

/* ---- The table of ops -------------------------------------------------------------------------------- */

static const char *const kinds[] = {"storage", "parameter", "statistic", "index", "argmax", "float"};
static const char *const types[] = {"integer", "real", "boolean", "choice"};

static void put_slots(json_writer *w, const char *key, const vjp_pass_info *pass, bool outputs) {
    json_put_array(w, key);
    for (size_t i = outputs ? 0 : pass->outputs; i < (outputs ? pass->outputs : pass->count); i++) {
        const vjp_slot *slot = &pass->slots[i];
        json_put_object(w, NULL);
        json_put_text(w, "name", slot->name);
        json_put_text(w, "shape", slot->shape);
        json_put_text(w, "kind", kinds[slot->kind]);
        json_put_boolean(w, "optional", slot->flags & (VJP_SLOT_OPTIONAL | VJP_SLOT_OUTPUT));
        json_put_text(w, "about", slot->about);
        json_put_object_end(w);
    }
    json_put_array_end(w);
}

static void put_attribute(json_writer *w, const vjp_attribute *a) {
    json_put_object(w, NULL);
    json_put_text(w, "name", a->name);
    json_put_text(w, "type", types[a->type]);
    if (a->type == VJP_REAL) json_put_real(w, "default", a->real);
    if (a->type == VJP_INTEGER) json_put_integer(w, "default", a->integer);
    if (a->type == VJP_BOOLEAN) json_put_boolean(w, "default", a->integer != 0);
    if (a->type == VJP_CHOICE) {
        json_put_text(w, "default", a->choices[a->integer]);
        json_put_array(w, "choices");
        for (size_t i = 0; a->choices[i]; i++)
            json_put_text(w, NULL, a->choices[i]);
        json_put_array_end(w);
    }
    json_put_text(w, "about", a->about);
    json_put_object_end(w);
}

char *vjp_web_ops(void);
WEB_EXPORT(vjp_web_ops) char *vjp_web_ops(void) {
    json_writer w = {.compact = true};
    json_put_array(&w, NULL);
    for (size_t i = 0; i < vjp_op_count(); i++) {
        const vjp_op_info *info = vjp_op_describe(vjp_op_at(i));
        json_put_object(&w, NULL);
        json_put_text(&w, "name", info->name);
        json_put_text(&w, "family", info->family);
        json_put_text(&w, "about", info->about);
        json_put_text(&w, "formula", info->formula);
        json_put_object(&w, "passes");
        for (int p = 0; p < VJP_PASS_COUNT && info->pass[p].count; p++) {
            json_put_object(&w, p == VJP_FORWARD ? "forward" : "backward");
            put_slots(&w, "inputs", &info->pass[p], false);
            put_slots(&w, "outputs", &info->pass[p], true);
            json_put_object_end(&w);
        }
        json_put_object_end(&w);
        json_put_array(&w, "attributes");
        for (size_t k = 0; k < info->attribute_count; k++)
            put_attribute(&w, &info->attributes[k]);
        json_put_array_end(&w);
        json_put_object_end(&w);
    }
    json_put_array_end(&w);
    return web_take(&w);
}
