//! Keeps a ConfigMap beside each object: `NAME-SUFFIX` holds the object's `spec.value`, and goes when the object goes.
//! `SUFFIX` is the operator's `config.suffix`, so that many copies can run side by side.

const std = @import("std");
const torpor = @import("torpor");
/// Set when built (`--mod-build`), so that copies differ.
const build = @import("build");

comptime {
    torpor.exportOperator(@This());
}

pub const manifest = "{\"for\": {\"resource\": \"example.com/v1/widgets\"}, \"sdk\": \"zig/0.1.0\"}";

const Settings = struct { config: struct { suffix: []const u8 = "mirror", resource: []const u8 = "widgets" } = .{} };
const Primary = struct { spec: struct { value: []const u8 = "" } = .{} };

pub fn reconcile(arena: std.mem.Allocator, request: torpor.Request) !torpor.Outcome {
    const lenient = std.json.ParseOptions{ .ignore_unknown_fields = true };
    const settings = try std.json.parseFromSliceLeaky(Settings, arena, try torpor.config(arena), lenient);
    const primary = try torpor.kubeRequest(arena, .{
        .method = "GET",
        .path = try std.fmt.allocPrint(arena, "/apis/example.com/v1/namespaces/{s}/{s}/{s}", .{ request.namespace, settings.config.resource, request.name }),
    });
    const copy = try std.fmt.allocPrint(arena, "{s}-{s}", .{ request.name, settings.config.suffix });
    const path = try std.fmt.allocPrint(arena, "/api/v1/namespaces/{s}/configmaps/{s}", .{ request.namespace, copy });
    if (primary.status == 404) return remove(arena, path);
    if (primary.status != 200) return error.CannotRead;

    const object = try std.json.parseFromSliceLeaky(Primary, arena, primary.body, lenient);
    const body = try std.fmt.allocPrint(
        arena,
        "{{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{{\"name\":\"{s}\"}},\"data\":{{\"value\":{f},\"by\":\"zig\",\"build\":\"{s}\"}}}}",
        .{ copy, std.json.fmt(object.spec.value, .{}), build.id },
    );
    const applied = try torpor.kubeRequest(arena, .{
        .method = "PATCH",
        .path = try std.fmt.allocPrint(arena, "{s}?fieldManager=mirror&force=true", .{path}),
        .content_type = "application/apply-patch+yaml",
        .body = body,
    });
    if (applied.status >= 300) {
        torpor.log(.err, applied.body);
        return error.CannotWrite;
    }
    return .done;
}

fn remove(arena: std.mem.Allocator, path: []const u8) !torpor.Outcome {
    const deleted = try torpor.kubeRequest(arena, .{ .method = "DELETE", .path = path });
    if (deleted.status != 200 and deleted.status != 202 and deleted.status != 404) return error.CannotDelete;
    return .done;
}
