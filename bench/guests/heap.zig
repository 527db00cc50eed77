//! The mirror's first host call and no more, with 64 MiB of heap touched at initialisation.

const std = @import("std");
const torpor = @import("torpor");
const build = @import("build");

comptime {
    torpor.exportOperator(@This());
}

pub const manifest = "{\"for\": {\"resource\": \"example.com/v1/widgets\"}, \"sdk\": \"zig/0.1.0\"}";

var heap: []u64 = &.{};

/// Runs in `_initialize`. Values that differ, so that no page is like another.
pub fn main() void {
    heap = std.heap.page_allocator.alloc(u64, build.heap_bytes / @sizeOf(u64)) catch @trap();
    var value: u64 = 0x9e3779b97f4a7c15;
    for (heap) |*word| {
        value = value *% 6364136223846793005 +% 1442695040888963407;
        word.* = value;
    }
}

pub fn reconcile(arena: std.mem.Allocator, request: torpor.Request) !torpor.Outcome {
    const settings = try torpor.config(arena);
    // One word far apart from the last one read, so that the heap is really the guest's.
    const at = (settings.len + request.name.len) * 1_000_003 % heap.len;
    if (heap[at] == 0) return error.HeapLost;
    return .done;
}
