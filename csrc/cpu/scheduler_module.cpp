// The Python module `vllm_expertplex._scheduler`: the CPU backend's engine, and the policy as pure
// functions. Tensors cross as addresses; vllm_expertplex/moe_server/backend_tiles.py checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/engine.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace expertplex;
using namespace expertplex::cpu;

namespace {
// The engine never takes the interpreter's lock while it holds its own, and Python never waits for
// the engine's lock while it holds the interpreter's: everything below releases it first.
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* address(uint64_t value) {
  return reinterpret_cast<T*>(value);
}

class PyEngine {
 public:
  PyEngine(const std::string& libtorch, Model model, const Settings& settings)
      : products_(libtorch), engine_(std::move(model), products_, settings, complete) {}

  ~PyEngine() {  // a worker may be waiting for the interpreter's lock
    nb::gil_scoped_release release;
    engine_.stop();
  }

  // Tuples (source, phase, layer, tokens, topk, x, topk_ids, out, operation):
  // addresses, and an object whose complete() is called when `out` is whole.
  void submit(const nb::list& operations) {
    std::vector<Submission> submissions;
    submissions.reserve(operations.size());
    for (nb::handle item : operations) {
      const auto t = nb::cast<nb::tuple>(item);
      const auto integer = [&](size_t i) { return nb::cast<uint64_t>(t[i]); };
      Submission s{};
      s.source = static_cast<uint32_t>(integer(0));
      s.phase = static_cast<uint32_t>(integer(1));
      s.layer = static_cast<uint32_t>(integer(2));
      if (s.source >= kMaxSources || s.phase >= kPhases || s.layer >= engine_.model().layers.size())
        throw std::invalid_argument("operation of source " + std::to_string(s.source) + ", phase " +
                                    std::to_string(s.phase) + ", layer " + std::to_string(s.layer) +
                                    ": expected below " + std::to_string(kMaxSources) + ", " +
                                    std::to_string(kPhases) + ", " +
                                    std::to_string(engine_.model().layers.size()));
      s.member.tokens = static_cast<uint32_t>(integer(3));
      s.member.topk = static_cast<uint32_t>(integer(4));
      s.member.x = address<const char>(integer(5));
      s.member.topk_ids = address<const int32_t>(integer(6));
      s.member.out = address<float>(integer(7));
      s.member.handle = t[8].ptr();
      submissions.push_back(s);
    }
    for (const Submission& s : submissions) Py_INCREF(static_cast<PyObject*>(s.member.handle));
    nb::gil_scoped_release release;
    engine_.submit(submissions);
  }

  void stop() { engine_.stop(); }
  void check() { engine_.check(); }

  nb::dict totals() {
    Totals t;
    {
      nb::gil_scoped_release release;
      t = engine_.totals();
    }
    nb::dict d;
    d["submitted"] = nb::make_tuple(t.submitted[kDecode], t.submitted[kPrefill]);
    d["done"] = nb::make_tuple(t.done[kDecode], t.done[kPrefill]);
    d["coalesced"] = t.coalesced;
    d["decode_share"] = engine_.settings().scheduler.budget.q;
    d["decode_share_last"] = t.share_last;
    d["decode_share_mean"] =
        t.shares ? static_cast<double>(t.share_sum) / static_cast<double>(t.shares) : 0.0;
    return d;
  }

  nb::list workers() const {
    nb::list all;
    for (const WorkerStats& w : engine_.workers()) {
      const Counters& c = w.scheduling.counters;
      nb::dict d;
      d["tiles"] = nb::make_tuple(load_relaxed(c.tiles[kDecode]), load_relaxed(c.tiles[kPrefill]));
      d["preemptions"] = load_relaxed(c.preemptions);
      d["preempt_ns"] = load_relaxed(c.preempt_ns);
      d["preempt_max_ns"] = load_relaxed(c.preempt_max_ns);
      d["holds"] = load_relaxed(c.holds);
      d["idle_ns"] = load_relaxed(w.idle_ns);
      d["busy_ns"] =
          nb::make_tuple(load_relaxed(w.busy_ns[kDecode]), load_relaxed(w.busy_ns[kPrefill]));
      d["weight_bytes"] = nb::make_tuple(load_relaxed(w.weight_bytes[kDecode]),
                                         load_relaxed(w.weight_bytes[kPrefill]));
      all.append(d);
    }
    return all;
  }

  // Per worker: (events lost, [(start_ns, end_ns, phase, stage, layer, sources, ticket)]). After
  // stop().
  nb::list trace() const {
    nb::list all;
    for (const WorkerStats& w : engine_.workers()) {
      nb::list events;
      for (const Event& e : w.track.events())
        events.append(nb::make_tuple(e.start_ns, e.end_ns, e.phase, kStageNames[e.stage], e.layer,
                                     e.sources, e.ticket));
      all.append(nb::make_tuple(w.track.lost(), events));
    }
    return all;
  }

 private:
  static void complete(void* handle) {
    nb::gil_scoped_acquire acquire;
    nb::steal(static_cast<PyObject*>(handle)).attr("complete")();
  }

  const Products products_;
  Engine engine_;
};
}  // namespace

NB_MODULE(_scheduler, m) {
  m.attr("DECODE") = kDecode;
  m.attr("PREFILL") = kPrefill;
  m.attr("MAX_SOURCES") = kMaxSources;
  m.attr("MAX_WORKERS") = kMaxWorkers;
  m.attr("PANEL") = kPanel;

  nb::enum_<Dtype>(m, "Dtype")
      .value("FLOAT32", Dtype::kFloat32)
      .value("BFLOAT16", Dtype::kBfloat16)
      .value("FLOAT16", Dtype::kFloat16)
      .value("FLOAT8", Dtype::kFloat8);
  nb::enum_<Layout>(m, "Layout")
      .value("CONTIGUOUS", Layout::kContiguous)
      .value("MASKED", Layout::kMasked);

  nb::class_<Model>(m, "Model")
      .def(
          "__init__",
          [](Model* self, int64_t hidden, int64_t intermediate, uint32_t experts, Dtype stored,
             Dtype compute, Dtype activations) {
            new (self) Model{hidden, intermediate, experts, stored, compute, activations, {}};
          },
          "hidden"_a, "intermediate"_a, "experts"_a, "stored"_a, "compute"_a, "activations"_a)
      .def(
          "add_layer",
          [](Model& self, uint64_t w13, uint64_t w2, uint64_t scale13, uint64_t scale2) {
            self.layers.push_back({address<const char>(w13), address<const char>(w2),
                                   address<const float>(scale13), address<const float>(scale2)});
          },
          "w13"_a, "w2"_a, "scale13"_a = 0, "scale2"_a = 0);
  nb::class_<TileSizes>(m, "TileSizes")
      .def(
          "__init__",
          [](TileSizes* self, Layout layout, uint32_t tile_m, uint32_t gate_up_panels,
             uint32_t down_panels, uint32_t token_block, uint32_t inline_tokens) {
            new (self)
                TileSizes{layout, tile_m, gate_up_panels, down_panels, token_block, inline_tokens};
          },
          nb::kw_only(), "layout"_a, "tile_m"_a, "gate_up_panels"_a, "down_panels"_a,
          "token_block"_a, "inline_tokens"_a);
  nb::class_<Settings>(m, "Settings")
      .def(
          "__init__",
          [](Settings* self, uint32_t workers, uint32_t q, uint32_t q_max, uint32_t x_star,
             const TileSizes& decode, const TileSizes& prefill, uint32_t quantum, uint64_t hold_ns,
             bool fifo, bool coalescing, uint64_t window_ns, uint64_t stale_ns, uint64_t spin_ns,
             uint64_t deadline_ns, uint64_t trace_events) {
            new (self) Settings{{workers, quantum, hold_ns, {q, q_max, x_star, 1}},
                                {decode, prefill},
                                fifo,
                                coalescing,
                                window_ns,
                                stale_ns,
                                spin_ns,
                                deadline_ns,
                                trace_events};
          },
          nb::kw_only(), "workers"_a, "q"_a, "q_max"_a, "x_star"_a, "decode"_a, "prefill"_a,
          "quantum"_a, "hold_ns"_a, "fifo"_a, "coalescing"_a, "window_ns"_a, "stale_ns"_a,
          "spin_ns"_a, "deadline_ns"_a, "trace_events"_a);

  nb::class_<PyEngine>(m, "Engine")
      .def(nb::init<const std::string&, Model, const Settings&>(), "libtorch"_a, "model"_a,
           "settings"_a)
      .def("submit", &PyEngine::submit, "operations"_a)
      .def("stop", &PyEngine::stop, ReleaseGil())
      .def("check", &PyEngine::check, ReleaseGil())
      .def("totals", &PyEngine::totals)
      .def("workers", &PyEngine::workers)
      .def("trace", &PyEngine::trace);

  m.def(
      "supports",
      [](const std::string& libtorch, Dtype compute) {
        return Products(libtorch).supports(compute);
      },
      "libtorch"_a, "compute"_a);
  m.def(
      "pack",
      [](uint64_t weight, int64_t experts, int64_t n, int64_t k, Dtype stored, Dtype compute) {
        for (int64_t e = 0; e < experts; ++e)
          pack(address<char>(weight) + e * n * k * size_of(stored), n, k, stored, compute);
      },
      "weight"_a, "experts"_a, "n"_a, "k"_a, "stored"_a, "compute"_a, ReleaseGil());
  m.def(
      "sm_budget",
      [](uint32_t q, uint32_t q_max, uint32_t x_star, uint32_t cluster, uint32_t x_moe) {
        if (!x_star || !cluster)
          throw std::invalid_argument("x_star and cluster must be at least 1");
        return sm_budget({q, q_max, x_star, cluster}, x_moe);
      },
      nb::kw_only(), "q"_a, "q_max"_a, "x_star"_a, "cluster"_a, "x_moe"_a);
}
