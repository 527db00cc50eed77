//! Says in its log what an image must not repeat: random names, the clock, the configuration as it is now.

const std = @import("std");
const torpor = @import("torpor");

comptime {
    torpor.exportOperator(@This());
}

pub const manifest = "{\"for\": {\"resource\": \"example.com/v1/widgets\"}, \"sdk\": \"zig/0.1.0\"}";

pub fn reconcile(arena: std.mem.Allocator, _: torpor.Request) !torpor.Outcome {
    var random: [8]u8 = undefined;
    if (std.os.wasi.random_get(&random, random.len) != .SUCCESS) return error.NoRandomness;
    var now_ns: u64 = undefined;
    if (std.os.wasi.clock_time_get(.MONOTONIC, 1, &now_ns) != .SUCCESS) return error.NoClock;
    const config = try torpor.config(arena);
    torpor.log(.info, try std.fmt.allocPrint(
        arena,
        "{{\"names\":{{\"random_get\":\"{x}\"}},\"monotonic_ns\":{d},\"settings\":{s}}}",
        .{ std.mem.readInt(u64, &random, .little), now_ns, config },
    ));
    return .done;
}
