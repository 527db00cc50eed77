//! The Torpor operator ABI (proto/wit/abi.md) for Zig: write `reconcile`, call `kubeRequest`.
//!
//!     const torpor = @import("torpor");
//!     comptime { torpor.exportOperator(@This()); }
//!     pub const manifest = \\{"for": {"resource": "example.com/v1/widgets"}}
//!     ;
//!     pub fn reconcile(arena: std.mem.Allocator, request: torpor.Request) !torpor.Outcome { … }
//!
//! Everything allocated while one call runs comes from one arena, which is emptied before the next call.

const std = @import("std");

pub const Error = error{ Deadline, Unavailable, Fenced, Denied, TooLarge, Unimplemented, Invalid, OutOfMemory };

/// The key to reconcile and why. Level-triggered: do not depend on the cause.
pub const Request = struct {
    namespace: []const u8,
    name: []const u8,
    cause: []const u8,
    attempt: u32,
    traceparent: []const u8,
};

pub const Outcome = union(enum) {
    done,
    /// Milliseconds from now.
    requeue_after: u64,
};

pub const KubeRequest = struct {
    method: []const u8,
    /// Path and query, from `/api` or `/apis`.
    path: []const u8,
    accept: []const u8 = "application/json",
    content_type: []const u8 = "application/json",
    body: []const u8 = "",
    /// 0: as long as the reconcile has.
    timeout_ms: u64 = 0,
};

pub const Response = struct {
    status: u16,
    content_type: []const u8,
    body: []const u8,
};

pub const Level = enum(i32) { debug = 0, info = 1, warning = 2, err = 3 };

const imports = struct {
    extern "torpor" fn kube_request(ptr: [*]const u8, len: usize) i32;
    extern "torpor" fn config() i32;
    extern "torpor" fn log(level: i32, ptr: [*]const u8, len: usize) void;
    extern "torpor" fn take(ptr: [*]u8, len: usize) i32;
};

/// A request to the Kubernetes API, as the operator. Any status is an answer; no answer is an error.
pub fn kubeRequest(arena: std.mem.Allocator, request: KubeRequest) Error!Response {
    var timeout: [20]u8 = undefined;
    const message = try encode(arena, &.{
        request.method,
        request.path,
        request.accept,
        request.content_type,
        request.body,
        if (request.timeout_ms == 0) "" else std.fmt.bufPrint(&timeout, "{d}", .{request.timeout_ms}) catch unreachable,
    });
    var fields = Fields{ .bytes = try result(arena, imports.kube_request(message.ptr, message.len)) };
    const status = fields.next();
    const content_type = fields.next();
    const body = fields.next();
    try check(fields.next(), fields.next());
    return .{ .status = std.fmt.parseInt(u16, status, 10) catch return error.Invalid, .content_type = content_type, .body = body };
}

/// `{"config": {…}, "env": {…}}` as JSON, as they are now.
pub fn config(arena: std.mem.Allocator) Error![]const u8 {
    return result(arena, imports.config());
}

pub fn log(level: Level, line: []const u8) void {
    imports.log(@intFromEnum(level), line.ptr, line.len);
}

fn check(code: []const u8, message: []const u8) Error!void {
    if (code.len == 0) return;
    log(.warning, message);
    const names = .{
        .{ "deadline", error.Deadline },
        .{ "unavailable", error.Unavailable },
        .{ "fenced", error.Fenced },
        .{ "denied", error.Denied },
        .{ "too-large", error.TooLarge },
        .{ "unimplemented", error.Unimplemented },
    };
    inline for (names) |entry| {
        if (std.mem.eql(u8, code, entry[0])) return entry[1];
    }
    return error.Invalid;
}

/// Takes the pending result whose length a call returned.
fn result(arena: std.mem.Allocator, length: i32) Error![]const u8 {
    if (length < 0) return error.Invalid;
    const buffer = try arena.alloc(u8, @intCast(length));
    if (imports.take(buffer.ptr, buffer.len) != length) return error.Invalid;
    return buffer;
}

/// A message: each field its length (u32, little-endian) and its bytes.
fn encode(arena: std.mem.Allocator, fields: []const []const u8) Error![]const u8 {
    var size: usize = 0;
    for (fields) |field| size += 4 + field.len;
    const message = try arena.alloc(u8, size);
    var at: usize = 0;
    for (fields) |field| {
        std.mem.writeInt(u32, message[at..][0..4], @intCast(field.len), .little);
        @memcpy(message[at + 4 ..][0..field.len], field);
        at += 4 + field.len;
    }
    return message;
}

/// Reads fields in order; those missing at the end, or cut off, are empty.
const Fields = struct {
    bytes: []const u8,

    fn next(self: *Fields) []const u8 {
        if (self.bytes.len < 4) return "";
        const length = std.mem.readInt(u32, self.bytes[0..4], .little);
        if (length > self.bytes.len - 4) return "";
        const field = self.bytes[4..][0..length];
        self.bytes = self.bytes[4 + length ..];
        return field;
    }
};

var arena_state = std.heap.ArenaAllocator.init(std.heap.wasm_allocator);
var input: []u8 = &.{};

/// Exports the ABI for `Operator`, which declares `manifest` and `reconcile`.
pub fn exportOperator(comptime Operator: type) void {
    const exported = struct {
        fn abiVersion() callconv(.c) i32 {
            return 1;
        }

        /// Every call begins here: what the last one allocated is free again.
        fn alloc(len: usize) callconv(.c) ?[*]u8 {
            _ = arena_state.reset(.retain_capacity);
            input = arena_state.allocator().alloc(u8, len) catch return null;
            return input.ptr;
        }

        fn describe() callconv(.c) i64 {
            _ = arena_state.reset(.retain_capacity);
            return reply(&.{ "", Operator.manifest });
        }

        fn reconcile(ptr: [*]const u8, len: usize) callconv(.c) i64 {
            var fields = Fields{ .bytes = ptr[0..len] };
            const request = Request{
                .namespace = fields.next(),
                .name = fields.next(),
                .cause = fields.next(),
                .attempt = std.fmt.parseInt(u32, fields.next(), 10) catch 0,
                .traceparent = fields.next(),
            };
            const outcome = Operator.reconcile(arena_state.allocator(), request) catch |err|
                return reply(&.{ "error", "", @errorName(err) });
            switch (outcome) {
                .done => return reply(&.{"done"}),
                .requeue_after => |milliseconds| {
                    var text: [20]u8 = undefined;
                    return reply(&.{ "requeue", std.fmt.bufPrint(&text, "{d}", .{milliseconds}) catch unreachable });
                },
            }
        }

        fn reply(fields: []const []const u8) i64 {
            const message = encode(arena_state.allocator(), fields) catch @trap();
            return @bitCast((@as(u64, @intFromPtr(message.ptr)) << 32) | message.len);
        }
    };
    @export(&exported.abiVersion, .{ .name = "torpor_abi_version" });
    @export(&exported.alloc, .{ .name = "torpor_alloc" });
    @export(&exported.describe, .{ .name = "torpor_describe" });
    @export(&exported.reconcile, .{ .name = "torpor_reconcile" });
}
