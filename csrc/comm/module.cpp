// Python binding of the one-sided shared-memory path: `vllm_expertplex._comm`.
//
// Tensors cross as addresses: the callers hold them, and a call must not cost more than the copy
// it makes. Everything that can wait releases the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "comm/attention_endpoint.h"
#include "comm/moe_endpoint.h"

namespace nb = nanobind;
using namespace expertplex;

namespace {

// The words of a MoE server that its parent reads and writes.
class BoardControl {
 public:
  BoardControl(const std::string& path, bool create) : mapping_(path, create) {}
  double heartbeat_age_s() const {
    const auto beat = static_cast<int64_t>(board().heartbeat_ns.load(std::memory_order_relaxed));
    return beat == 0 ? -1.0 : static_cast<double>(monotonic_ns() - beat) * 1e-9;
  }
  void stop() {
    board().stop.store(1, std::memory_order_release);
    ring(board().bell);
  }
  nb::dict counters(uint32_t phase) const {
    nb::dict result;
    const uint32_t p = phase != 0;
    result["operations"] = board().operations[p].load(std::memory_order_relaxed);
    result["tokens"] = board().tokens[p].load(std::memory_order_relaxed);
    result["busy_ns"] = board().busy_ns[p].load(std::memory_order_relaxed);
    return result;
  }
  std::vector<uint64_t> backend_counters() const {
    std::vector<uint64_t> values;
    for (const auto& counter : board().backend) {
      values.push_back(counter.load(std::memory_order_relaxed));
    }
    return values;
  }

 private:
  Board& board() const { return mapping_.board(); }
  BoardMapping mapping_;
};

// The words of a slot that the parent of all servers reads and writes.
class SlotControl {
 public:
  SlotControl(const std::string& path, const Shape& shape, bool create)
      : slot_(path, shape, create) {}
  void fail() { mark_failed(slot_.header()); }
  nb::dict counters() const {
    const SlotHeader& header = slot_.header();
    nb::dict result;
    result["operations"] = header.operations.load(std::memory_order_relaxed);
    result["dispatch_ns"] = header.dispatch_ns.load(std::memory_order_relaxed);
    result["wait_ns"] = header.wait_ns.load(std::memory_order_relaxed);
    result["combine_ns"] = header.combine_ns.load(std::memory_order_relaxed);
    result["tokens_sent"] = header.tokens_sent.load(std::memory_order_relaxed);
    return result;
  }

 private:
  Slot slot_;
};

}  // namespace

NB_MODULE(_comm, m) {
  m.doc() = "One-sided dispatch and combine over shared memory.";
  m.attr("VERSION") = kVersion;
  // Servers end with endpoints alive; there is nothing to report then.
  nb::set_leak_warnings(false);

  nb::class_<Shape>(m, "Shape", "Shapes of one slot; `item` is bytes per activation element.")
      .def(nb::init<uint32_t, uint32_t, uint32_t, uint32_t>(), nb::arg("max_tokens"),
           nb::arg("hidden"), nb::arg("topk"), nb::arg("item"))
      .def_ro("max_tokens", &Shape::max_tokens)
      .def_ro("hidden", &Shape::hidden)
      .def_ro("topk", &Shape::topk)
      .def_ro("item", &Shape::item)
      .def_prop_ro("bytes", [](const Shape& s) { return Offsets(s).size; });

  nb::class_<Operation>(m, "Operation", "A layer's tokens from one attention server.")
      .def_ro("source", &Operation::source)
      .def_ro("sequence", &Operation::sequence)
      .def_ro("layer", &Operation::layer)
      .def_ro("phase", &Operation::phase)
      .def_ro("tokens", &Operation::tokens);

  nb::class_<BoardControl>(m, "Board")
      .def(nb::init<const std::string&, bool>(), nb::arg("path"), nb::arg("create"))
      .def("heartbeat_age_s", &BoardControl::heartbeat_age_s, "Seconds, or -1 before the first.")
      .def("stop", &BoardControl::stop)
      .def("counters", &BoardControl::counters, nb::arg("phase"))
      .def("backend_counters", &BoardControl::backend_counters);

  nb::class_<SlotControl>(m, "Slot")
      .def(nb::init<const std::string&, const Shape&, bool>(), nb::arg("path"), nb::arg("shape"),
           nb::arg("create"))
      .def("fail", &SlotControl::fail, "Marks the MoE server gone and wakes who waits for it.")
      .def("counters", &SlotControl::counters);

  nb::class_<AttentionEndpoint>(m, "AttentionEndpoint")
      .def(
          "__init__",
          [](AttentionEndpoint* self, const std::vector<std::string>& slots,
             const std::vector<std::string>& boards, const Shape& shape,
             std::vector<int32_t> expert_server, std::vector<int32_t> expert_slot,
             int64_t spin_ns) {
            new (self) AttentionEndpoint(
                slots, boards, shape, {std::move(expert_server), std::move(expert_slot)}, spin_ns);
          },
          nb::arg("slots"), nb::arg("boards"), nb::arg("shape"), nb::arg("expert_server"),
          nb::arg("expert_slot"), nb::arg("spin_ns"))
      .def(
          "dispatch",
          [](AttentionEndpoint& self, uintptr_t x, uintptr_t ids, uintptr_t weights,
             uint32_t tokens, uint32_t layer, uint32_t phase) {
            self.dispatch(reinterpret_cast<const char*>(x), reinterpret_cast<const int32_t*>(ids),
                          reinterpret_cast<const float*>(weights), tokens, layer, phase);
          },
          nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("tokens"), nb::arg("layer"),
          nb::arg("phase"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "combine",
          [](AttentionEndpoint& self, uintptr_t out, int64_t timeout_ns) {
            return self.combine(reinterpret_cast<float*>(out), timeout_ns);
          },
          nb::arg("out"), nb::arg("timeout_ns"), nb::call_guard<nb::gil_scoped_release>(),
          "-1, or the rank of the MoE server that did not answer.")
      .def_prop_ro("operations", &AttentionEndpoint::operations);

  nb::class_<MoeEndpoint>(m, "MoeEndpoint")
      .def(nb::init<const std::vector<std::string>&, const std::vector<Shape>&, const std::string&,
                    int64_t>(),
           nb::arg("slots"), nb::arg("shapes"), nb::arg("board"), nb::arg("spin_ns"))
      .def("wait", &MoeEndpoint::wait, nb::arg("timeout_ns"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("complete", &MoeEndpoint::complete, nb::arg("operation"), nb::arg("busy_ns"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("beat", &MoeEndpoint::beat)
      .def("report", &MoeEndpoint::report, nb::arg("counters"))
      .def_prop_ro("stopping", &MoeEndpoint::stopping)
      .def(
          "buffers",
          [](const MoeEndpoint& self, size_t source) {
            const Slot& slot = self.slot(source);
            return nb::make_tuple(reinterpret_cast<uintptr_t>(slot.x()),
                                  reinterpret_cast<uintptr_t>(slot.ids()),
                                  reinterpret_cast<uintptr_t>(slot.out()));
          },
          nb::arg("source"), "Addresses of x, ids and out of a slot.");
}
