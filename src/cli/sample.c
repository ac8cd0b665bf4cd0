/* SPDX-License-Identifier: MIT */
/*
 * vjp sample: generates text with a trained model, for one prompt, for each line of a file, or as a conversation.
 *
 * Text is shown as it arrives, whole characters only. Of several texts that are generated together, the first one is
 * shown while it grows and the others when those before them have ended, so that the output has the order of the
 * prompts. An interrupt (Ctrl-C) ends the texts where they are and keeps what there is.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "core/arithmetic.h"
#include "core/system.h"
#include "text/chat.h"
#include "train/files/input.h"
#include "train/generate/sampler.h"

enum { MAX_PROMPT_FILE = 256 << 20, USUAL_BATCH = 8, USUAL_BYTES = 500 };

typedef struct arguments {
    cli_device_options on;
    const char *prompt, *prompts, *system, *base; /* NULL: not given */
    sampler_options options;
    sampler_settings settings;
    cli_list stop;
    int64_t bytes, tokens, seed, batch;
    bool chat, json;
} arguments;

/* ---- Stopping ---------------------------------------------------------------------------------------- */

static volatile sig_atomic_t asked_to_stop, waiting_for_input;

static void stop(void) {
    if (waiting_for_input) _Exit(CLI_OK); /* everything has been shown */
    asked_to_stop = 1;
}

/* ---- Prompts ----------------------------------------------------------------------------------------- */

typedef struct prompt_list {
    char *memory;
    char **item;
    size_t count, room;
} prompt_list;

static void free_prompts(prompt_list *list) {
    free(list->item);
    free(list->memory);
}

static bool add_prompt(prompt_list *list, char *text, char error[TRAIN_ERROR]) {
    if (list->count == list->room) {
        char **larger = list_grow(list->item, list->count, 1, sizeof *larger, &list->room);
        if (!larger) return train_fail(error, "there is no memory for the prompts");
        list->item = larger;
    }
    list->item[list->count++] = text;
    return true;
}

/* The lines of a file that are not empty. */
static bool read_prompts(const char *path, prompt_list *list, char error[TRAIN_ERROR]) {
    int64_t bytes;
    FILE *stream = input_stream(path, MAX_PROMPT_FILE, &bytes, error);
    if (!stream) return false;
    list->memory = malloc((size_t)bytes + 1);
    size_t got = list->memory ? fread(list->memory, 1, (size_t)bytes, stream) : 0;
    bool failed = ferror(stream);
    fclose(stream);
    if (!list->memory) return train_fail(error, "there is no memory for the prompts");
    if (failed) return train_fail(error, "%.300s: it cannot be read", path);
    if (memchr(list->memory, 0, got)) return train_fail(error, "%.300s: it has zero bytes; it must be text", path);
    list->memory[got] = 0;
    for (char *line = list->memory, *end; line; line = end) {
        end = strchr(line, '\n');
        if (end) *end++ = 0;
        size_t length = strlen(line);
        if (length && line[length - 1] == '\r') line[--length] = 0;
        if (length && !add_prompt(list, line, error)) return false;
    }
    return list->count || train_fail(error, "%.300s: it has no prompts: each line is one", path);
}

/* A conversation that begins with this message, up to where the answer follows. */
static bool begin_chat(const chat_template *chat, const arguments *a, const char *message, byte_list *to) {
    return byte_list_add(to, chat->begin, strlen(chat->begin)) &&
           (!a->system || chat_add_message(chat, "system", a->system, to)) &&
           chat_add_message(chat, "user", message, to) && chat_add_answer(chat, to);
}

/* ---- Texts ------------------------------------------------------------------------------------------- */

static const char *reason_of(sampler_state state) {
    switch (state) {
    case SAMPLER_RUNNING: return "interrupted";
    case SAMPLER_END: return "end";
    case SAMPLER_STOP: return "stop";
    default: return "length";
    }
}

static bool print_json(const char *prompt, const sampler_answer *answer, char error[TRAIN_ERROR]) {
    byte_list text = {0};
    bool ok = byte_list_add(&text, answer->bytes, answer->count) && byte_list_add(&text, "", 1);
    for (size_t i = 0; ok && i < answer->count; i++)
        if (!text.bytes[i]) text.bytes[i] = ' '; /* a zero would end the text */
    if (ok) {
        cli_json_begin();
        cli_json_text("prompt", prompt);
        cli_json_text("text", text.bytes);
        cli_json_integer("tokens", answer->tokens);
        cli_json_text("ended", reason_of(answer->state));
        cli_json_end();
    }
    byte_list_free(&text);
    return ok || train_fail(error, "there is no memory for the text");
}

/* Generates the texts that the sampler has begun, and shows them in their order. */
static bool generate(sampler *s, const arguments *a, char *const *prompts, int count, char error[TRAIN_ERROR]) {
    int now = 0;
    size_t shown = 0;
    if (!a->json && !a->chat) fputs(prompts[0], stdout);
    while (now < count) {
        sampler_answer answer = sampler_answer_of(s, now);
        bool over = answer.state != SAMPLER_RUNNING || asked_to_stop;
        if (over) answer.ready = answer.count;
        if (!a->json && answer.ready > shown) {
            fwrite(answer.bytes + shown, 1, answer.ready - shown, stdout);
            shown = answer.ready;
        }
        if (!a->json) cli_flush();
        if (!over) {
            if (!sampler_next(s, error)) return false;
            continue;
        }
        if (a->json && !print_json(prompts[now], &answer, error)) return false;
        if (!a->json) putchar('\n');
        shown = 0;
        if (++now < count && !a->json) printf("\n%s", a->chat ? "" : prompts[now]);
    }
    return true;
}

/* One group of prompts after the other. */
static bool write_texts(sampler *s, const arguments *a, const chat_template *chat, const prompt_list *list,
                        char error[TRAIN_ERROR]) {
    bool ok = true;
    for (size_t first = 0; first < list->count && ok && !asked_to_stop; first += (size_t)a->settings.texts) {
        sampler_prompt prompts[SAMPLER_MAX_TEXTS];
        byte_list filled[SAMPLER_MAX_TEXTS] = {{0}};
        int count = (int)vjp_min(a->settings.texts, (int64_t)(list->count - first));
        for (int i = 0; i < count && ok; i++) {
            const char *text = list->item[first + (size_t)i];
            prompts[i] = (sampler_prompt){text, strlen(text)};
            if (!chat) continue;
            ok = begin_chat(chat, a, text, &filled[i]) || train_fail(error, "there is no memory for the prompt");
            prompts[i] = (sampler_prompt){filled[i].bytes, filled[i].count};
        }
        if (first && !a->json) putchar('\n');
        ok = ok && sampler_begin(s, &a->options, prompts, count, error) &&
             generate(s, a, list->item + first, count, error);
        for (int i = 0; i < count; i++)
            byte_list_free(&filled[i]);
    }
    return ok;
}

/* ---- A conversation ---------------------------------------------------------------------------------- */

/* A line of standard input, without its end. False: there is none, or no memory. */
static bool read_line(byte_list *line) {
    line->count = 0;
    waiting_for_input = 1;
    int c;
    while ((c = getchar()) != EOF && c != '\n') {
        char byte = (char)(c ? c : ' ');
        if (!byte_list_add(line, &byte, 1)) break;
    }
    waiting_for_input = 0;
    return (c == '\n' || (c == EOF && line->count)) && byte_list_add(line, "", 1);
}

static bool converse(sampler *s, const arguments *a, const chat_template *chat, char error[TRAIN_ERROR]) {
    byte_list line = {0}, text = {0};
    bool ok = true, begun = false, terminal = system_output_is_terminal() && !a->json;
    while (ok && !asked_to_stop) {
        if (terminal) fputs("> ", stdout);
        cli_flush();
        if (!read_line(&line)) break;
        if (!line.bytes[strspn(line.bytes, " \t\r")]) continue;
        text.count = 0;
        bool filled = begun ? byte_list_add(&text, chat->after, strlen(chat->after)) &&
                                  chat_add_message(chat, "user", line.bytes, &text) && chat_add_answer(chat, &text)
                            : begin_chat(chat, a, line.bytes, &text);
        if (!filled) ok = train_fail(error, "there is no memory for the prompt");
        if (ok && begun)
            ok = sampler_continue(s, 0, text.bytes, text.count, error);
        else if (ok)
            ok = sampler_begin(s, &a->options, &(sampler_prompt){text.bytes, text.count}, 1, error);
        begun = true;
        ok = ok && generate(s, a, &line.bytes, 1, error);
    }
    byte_list_free(&line);
    byte_list_free(&text);
    return ok;
}

/* ---- The command ------------------------------------------------------------------------------------- */

static int run(arguments *a, const char *dir) {
    char error[TRAIN_ERROR], path[CHECKPOINT_PATH], *single = (char *)(a->prompt ? a->prompt : "");
    prompt_list list = {0};
    checkpoint from = {0};
    if (!(a->prompts ? read_prompts(a->prompts, &list, error) : add_prompt(&list, single, error))) {
        free_prompts(&list);
        return cli_fail("sample", "%s", error);
    }
    a->settings.texts = vjp_min(a->batch, (int64_t)list.count);
    int status = CLI_FAILURE;
    vjp_device *device = NULL;
    sampler *s = NULL;
    if (!checkpoint_open_newest(dir, path, &from, error)) {
        cli_fail("sample", "%s", error);
    } else if (!checkpoint_open_base(&from, a->base, error)) {
        cli_fail("sample", "%s: %s", path, error);
    } else if ((device = cli_open("sample", &a->on))) {
        s = sampler_open(device, &from, &a->settings, error);
        const chat_template *chat = s && a->chat ? chat_template_of(sampler_tokenizer(s), error) : NULL;
        bool ok = s && (chat || !a->chat);
        checkpoint_close(&from); /* the weights have been read */
        system_on_stop(stop);
        if (ok)
            ok = a->chat && !a->prompt && !a->prompts ? converse(s, a, chat, error)
                                                      : write_texts(s, a, chat, &list, error);
        status = ok ? CLI_OK : cli_fail("sample", "%s: %s", path, error);
    }
    sampler_close(s);
    vjp_close(device);
    checkpoint_close(&from);
    free_prompts(&list);
    return status;
}

int cli_sample(int argc, char **argv) {
    arguments a = {.on = CLI_DEVICE_DEFAULTS,
                   .options = {.draw = {.temperature = 0.8, .top_k = 40}},
                   .settings = {.dtype = -1},
                   .batch = USUAL_BATCH,
                   .seed = 1};
    draw_options *draw = &a.options.draw;
    const cli_option options[] = {
        CLI_OPTION_DEVICE(a.on),
        CLI_OPTION_THREADS(a.on),
        CLI_OPTION_PRODUCTS(a.on),
        {"prompt", 'p', "TEXT", "how the text begins", CLI_TEXT, &a.prompt, 0, 0},
        {"prompts", 0, "FILE", "one text for each line of a file, several at once", CLI_TEXT, &a.prompts, 0, 0},
        {"chat", 0, NULL, "the prompt is a message; without one, a conversation on standard input", CLI_FLAG, &a.chat,
         0, 0},
        {"system", 0, "TEXT", "the system's message, with --chat", CLI_TEXT, &a.system, 0, 0},
        {"bytes", 'n', "N", "how many bytes of text to generate; default 500", CLI_INTEGER, &a.bytes, 1, 100000000},
        {"tokens", 0, "N", "how many tokens to generate, instead of --bytes", CLI_INTEGER, &a.tokens, 1, 100000000},
        {"stop", 0, "TEXT", "the text ends before this; may be given several times", CLI_TEXTS, &a.stop, 0, 0},
        {"temperature", 0, "T", "randomness; 0: always the most likely token; default 0.8", CLI_REAL,
         &draw->temperature, 0, 1000},
        {"top-k", 0, "K", "choose among the K most likely tokens; 0: all; default 40", CLI_INTEGER, &draw->top_k, 0,
         1000000},
        {"top-p", 0, "P", "choose among the likeliest tokens that together have probability P", CLI_REAL, &draw->top_p,
         0, 1},
        {"min-p", 0, "P", "choose among tokens of at least P times the probability of the likeliest", CLI_REAL,
         &draw->min_p, 0, 1},
        {"repetition", 0, "R", "above 1: make tokens of the text so far less likely", CLI_REAL, &draw->repetition, 0,
         1000},
        {"seed", 0, "S", "another seed gives another text; default 1", CLI_INTEGER, &a.seed, 0, INT64_MAX},
        {"context", 0, "N", "tokens that the model sees at once; default: as trained, at most 4096", CLI_INTEGER,
         &a.settings.context, 1, 1 << 30},
        {"batch", 0, "N", "texts of --prompts that are generated at once; default 8", CLI_INTEGER, &a.batch, 1,
         SAMPLER_MAX_TEXTS},
        {"dtype", 0, "T", "f32, bf16 or f16; default: that of the weights", CLI_DTYPE, &a.settings.dtype, 0, 0},
        CLI_OPTION_BASE(a.base),
    };
    const cli_command command = {
        .name = "sample",
        .usage = "sample DIR [--prompt TEXT | --prompts FILE | --chat] [--bytes N] [--temperature T] [--seed S]",
        .about =
            "Generates text with a model: the newest checkpoint that `vjp train --out DIR` made, or DIR itself, a\n"
            "folder in the layout of Hugging Face, with a model or with adapters of PEFT.",
        .more = "Examples:\n"
                "  vjp sample run --prompt \"Once\" --temperature 0.7 --top-p 0.9\n"
                "  vjp sample run --prompts questions.txt --json --tokens 100 --stop Question:\n"
                "  vjp sample model --chat --system \"Answer briefly.\"\n"
                "Fields with --json: prompt, text, tokens, ended (end, stop, length or interrupted).",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .json = &a.json,
        .min_operands = 1,
        .max_operands = 1,
    };
    cli_operands operands;
    int status = cli_parse(&command, argc, argv, &operands);
    if (status != CLI_CONTINUE) return status;
    if (a.prompt && a.prompts) return cli_misuse("sample", "--prompt and --prompts exclude each other");
    if (a.system && !a.chat) return cli_misuse("sample", "--system needs --chat");
    if (a.settings.dtype == VJP_F64 || a.settings.dtype >= VJP_I32)
        return cli_misuse("sample", "--dtype is %s; it must be f32, bf16 or f16",
                          vjp_dtype_name((vjp_dtype)a.settings.dtype));
    if (a.stop.count > SAMPLER_MAX_STOPS)
        return cli_misuse("sample", "--stop is given more than %d times", SAMPLER_MAX_STOPS);
    for (int i = 0; i < a.stop.count; i++)
        a.options.stop[a.options.stops++] = a.stop.item[i];
    a.options.max_tokens = a.tokens;
    a.options.max_bytes = a.bytes ? a.bytes : a.tokens ? 0 : USUAL_BYTES;
    a.options.chat = a.chat;
    draw->seed = (uint64_t)a.seed;
    a.on.fixed_rows = true;
    return run(&a, operands.item[0]);
}
