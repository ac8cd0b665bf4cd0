/* The list of a model's parameters, and their first values. */
#include "train/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/philox.h"

vjp_value model_add(train_model *model, const char *name, double centre, double spread, bool decays, int ndim,
                    const int64_t *shape) {
    if (model->parameters == model->room) {
        int room = model->room ? 2 * model->room : 64;
        model_parameter *more = realloc(model->parameter, (size_t)room * sizeof *more);
        if (!more) return 0; /* the absent weight is then what the graph complains of */
        model->parameter = more;
        model->room = room;
    }
    vjp_value value = vjp_graph_parameter(model->graph, name, VJP_F32, ndim, shape);
    if (!value) return 0;
    model_parameter *p = &model->parameter[model->parameters++];
    *p = (model_parameter){.value = value, .spread = spread, .centre = centre, .decays = decays};
    snprintf(p->name, sizeof p->name, "%s", name);
    return value;
}

void model_free(train_model *model) {
    vjp_graph_destroy(model->graph);
    free(model->parameter);
    *model = (train_model){0};
}

int64_t model_size(const train_model *model) {
    int64_t size = 0;
    for (int i = 0; i < model->parameters; i++) {
        vjp_tensor tensor = vjp_graph_describe(model->graph, model->parameter[i].value);
        int64_t count = 1;
        for (int axis = 0; axis < tensor.ndim; axis++)
            count *= tensor.shape[axis];
        size += count;
    }
    return size;
}

/* FNV-1a: gives every parameter a stream of its own, whatever the order in which they are built. */
static uint32_t hash_of(const char *name) {
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash;
}

void model_begin(const model_parameter *parameter, uint64_t seed, float *data, int64_t count) {
    uint32_t name = hash_of(parameter->name);
    for (int64_t i = 0; i < count; i++) {
        data[i] = (float)parameter->centre;
        if (parameter->spread == 0) continue;
        /* One draw a number, from 64 random bits by Box and Muller. */
        vjp_philox words = {{(uint32_t)i, (uint32_t)((uint64_t)i >> 32), name, 0}};
        words = vjp_philox4x32_10(words, (uint32_t)seed, (uint32_t)(seed >> 32));
        double radius = sqrt(-2 * log(((double)words.word[0] + 0.5) * 0x1p-32));
        double angle = 2 * 3.14159265358979323846 * (double)words.word[1] * 0x1p-32;
        data[i] += (float)(parameter->spread * radius * cos(angle));
    }
}
