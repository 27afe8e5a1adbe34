// Where the fragments and the scales of matrix number `layer` of a radial network begin: the first has few inputs, a step
// of 16, and the others 16 STEPS. The emitter defines before: STEPS.
template <class T>
DEVICE T* fragments(T* packed, int layer) { return packed + (layer ? 1 + (layer - 1) * STEPS : 0) * 2 * STEPS * 32; }
template <class T>
DEVICE T* scales(T* backs, int layer) { return backs + layer * 16 * STEPS; }
