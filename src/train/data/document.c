/* SPDX-License-Identifier: MIT */
/* Encoding of a line; see document.h. */
#include "train/data/document.h"

#include <string.h>

static bool no_memory(char error[TRAIN_ERROR]) {
    return train_fail(error, "there is no memory for its tokens");
}

/* ---- Tokens ------------------------------------------------------------------------------------------ */

/* Adds the tokens of a text, with `marks`; `around` as in tokenizer_encode(). */
static bool add_text(const model_tokenizer *t, const char *text, size_t length, bool around, int32_t marks,
                     token_list *to, char error[TRAIN_ERROR]) {
    size_t begin = to->count;
    if (t->tokens) {
        if (!tokenizer_encode(t->tokens, text, length, around, to, error)) return false;
    } else {
        if (!token_list_reserve(to, length)) return no_memory(error);
        for (size_t i = 0; i < length; i++)
            to->ids[to->count++] = (unsigned char)text[i];
    }
    for (size_t i = begin; i < to->count; i++)
        to->ids[i] |= marks;
    return true;
}

/* Adds the token that ends a text, unless the tokenizer has added it. Bytes have none. */
static bool add_end(const model_tokenizer *t, token_list *to, char error[TRAIN_ERROR]) {
    bool ended = to->count && to->ids[to->count - 1] == t->end;
    if (!t->tokens || t->end < 0 || ended) return true;
    return token_list_add(to, &t->end, 1) || no_memory(error);
}

/* ---- The kinds of lines ------------------------------------------------------------------------------ */

static const char *text_member(const json_value *object, const char *key, char error[TRAIN_ERROR]) {
    const json_value *value = json_member(object, key);
    char shown[JSON_SHOWN];
    if (value && value->type == JSON_STRING) return value->text;
    if (value)
        train_fail(error, "\"%s\" is %s; it must be a text", key, json_show(value, shown));
    else
        train_fail(error, "\"%s\" is missing", key);
    return NULL;
}

static bool encode_text(const model_tokenizer *t, const json_value *line, document *to, char error[TRAIN_ERROR]) {
    const char *text = text_member(line, "text", error);
    return text && add_text(t, text, strlen(text), true, 0, &to->tokens, error) && add_end(t, &to->tokens, error);
}

static bool encode_completion(const model_tokenizer *t, const json_value *line, document *to, char error[TRAIN_ERROR]) {
    const char *prompt = text_member(line, "prompt", error);
    const char *completion = prompt ? text_member(line, "completion", error) : NULL;
    if (!completion || !add_text(t, prompt, strlen(prompt), true, DOCUMENT_GIVEN, &to->tokens, error)) return false;
    /* The tokenizer may put its end behind every text; here the text continues. */
    token_list *tokens = &to->tokens;
    if (t->tokens && t->end >= 0 && tokens->count && tokens->ids[tokens->count - 1] == (t->end | DOCUMENT_GIVEN))
        tokens->count--;
    to->whole = true;
    return add_text(t, completion, strlen(completion), false, 0, tokens, error) && add_end(t, tokens, error);
}

static bool is_role(const char *role) {
    return strcmp(role, "system") == 0 || strcmp(role, "user") == 0 || strcmp(role, "assistant") == 0;
}

/*
 * One message. The answer is encoded by itself, as it is when the model writes it: what it follows has been encoded
 * then. It ends with the token that ends a message; the blanks behind that are given.
 */
static bool encode_message(const model_tokenizer *t, const chat_template *chat, const char *role, const char *content,
                           byte_list *text, token_list *to, char error[TRAIN_ERROR]) {
    size_t end = strlen(chat->end), tail = strlen(chat->after) - end;
    size_t given = text->count + strlen(chat->before_role) + strlen(role) + strlen(chat->before);
    if (!chat_add_message(chat, role, content, text)) return no_memory(error);
    if (strcmp(role, "assistant") != 0) return true;
    size_t length = text->count - given - tail;
    bool ok = add_text(t, text->bytes, given, false, DOCUMENT_GIVEN, to, error) &&
              add_text(t, text->bytes + given, length, false, 0, to, error);
    text->count = 0; /* the blanks begin the next part */
    return ok && (byte_list_add(text, chat->after + end, tail) || no_memory(error));
}

static bool encode_messages(const model_tokenizer *t, const json_value *list, document *to, char error[TRAIN_ERROR]) {
    const chat_template *chat = chat_template_of(t->tokens, error);
    char shown[JSON_SHOWN], reason[TRAIN_ERROR];
    if (!chat) return false;
    if (list->type != JSON_ARRAY || !list->count)
        return train_fail(error, "\"messages\" is %s; it must be a list of messages", json_show(list, shown));
    byte_list text = {0};
    bool ok = byte_list_add(&text, chat->begin, strlen(chat->begin)) || no_memory(error);
    size_t number = 1;
    for (const json_value *message = list->first; message && ok; message = message->next, number++) {
        const char *role = text_member(message, "role", reason);
        const char *content = role ? text_member(message, "content", reason) : NULL;
        if (message->type != JSON_OBJECT)
            ok = train_fail(error, "message %zu is %s; it must be an object", number, json_show(message, shown));
        else if (!content)
            ok = train_fail(error, "message %zu: %.400s", number, reason);
        else if (!is_role(role))
            ok = train_fail(error, "message %zu: \"role\" is \"%.60s\"; it must be system, user or assistant", number,
                            role);
        else
            ok = encode_message(t, chat, role, content, &text, &to->tokens, error);
    }
    /* What follows the last answer is not needed to predict it. */
    byte_list_free(&text);
    to->whole = true;
    return ok;
}

/* ---- A line ------------------------------------------------------------------------------------------ */

static bool encode(const model_tokenizer *t, const json_value *line, document *to, char error[TRAIN_ERROR]) {
    char shown[JSON_SHOWN];
    if (line->type != JSON_OBJECT) return train_fail(error, "it is %s; it must be an object", json_show(line, shown));
    const json_value *text = json_member(line, "text"), *messages = json_member(line, "messages");
    const json_value *prompt = json_member(line, "prompt"), *completion = json_member(line, "completion");
    int kinds = (text != NULL) + (messages != NULL) + (prompt || completion);
    if (kinds > 1)
        return train_fail(error, "it has more than one of \"text\", \"messages\" and \"prompt\" with \"completion\"");
    if (text) return encode_text(t, line, to, error);
    if (messages) return encode_messages(t, messages, to, error);
    if (prompt || completion) return encode_completion(t, line, to, error);
    return train_fail(error, "it has none of \"text\", \"messages\" and \"prompt\" with \"completion\"");
}

/* Whether a token is predicted: any but the first that is not given. */
static bool trains(const token_list *tokens) {
    for (size_t i = 1; i < tokens->count; i++)
        if (!(tokens->ids[i] & DOCUMENT_GIVEN)) return true;
    return false;
}

bool document_encode(const model_tokenizer *t, const char *line, size_t length, document *to, char error[TRAIN_ERROR]) {
    json_document parsed = {0};
    to->tokens.count = 0;
    to->whole = false;
    bool ok = json_parse(line, length, &parsed, error) && encode(t, parsed.root, to, error);
    json_free(&parsed);
    if (ok && !trains(&to->tokens)) ok = train_fail(error, "there is nothing in it to train on");
    if (ok) to->tokens.ids[0] |= DOCUMENT_BEGINS;
    return ok;
}
