//! Attention in one region with the layout operations around it and the mask of its dropout.

use super::*;

/// A packed projection, attention over its heads, and the gradient of both.
const PACKED_ATTENTION: &str = r#"
    %x: f32[2, 3, 24] = input {name = "x", ty = {"dtype":"f32","shape":[2,3,24]}}
    %g: f32[2, 3, 8] = input {name = "g", ty = {"dtype":"f32","shape":[2,3,8]}}
    %q: f32[2, 3, 8], %k: f32[2, 3, 8], %v: f32[2, 3, 8] = split %x {axis = 2, sizes = [8,8,8]}
    %q4: f32[2, 3, 2, 4] = reshape %q {shape = [2,3,2,4]}
    %k4: f32[2, 3, 2, 4] = reshape %k {shape = [2,3,2,4]}
    %v4: f32[2, 3, 2, 4] = reshape %v {shape = [2,3,2,4]}
    %qt: f32[2, 2, 3, 4] = transpose %q4 {perm = [0,2,1,3]}
    %kt: f32[2, 2, 3, 4] = transpose %k4 {perm = [0,2,1,3]}
    %vt: f32[2, 2, 3, 4] = transpose %v4 {perm = [0,2,1,3]}
    %y: f32[2, 2, 3, 4], %l: f32[2, 2, 3] = attention %qt, %kt, %vt {causal = true, scale = 0.5}
    %yt: f32[2, 3, 2, 4] = transpose %y {perm = [0,2,1,3]}
    %z: f32[2, 3, 8] = reshape %yt {shape = [2,3,8]}
    %e: f32[2, 3, 8] = exp %z
    %g4: f32[2, 3, 2, 4] = reshape %g {shape = [2,3,2,4]} @backward
    %gt: f32[2, 2, 3, 4] = transpose %g4 {perm = [0,2,1,3]} @backward
    %dq: f32[2, 2, 3, 4], %dk: f32[2, 2, 3, 4], %dv: f32[2, 2, 3, 4] = attention_grad %gt, %qt, %kt, %vt, %y, %l {causal = true, scale = 0.5} @backward
    %dqt: f32[2, 3, 2, 4] = transpose %dq {perm = [0,2,1,3]} @backward
    %dkt: f32[2, 3, 2, 4] = transpose %dk {perm = [0,2,1,3]} @backward
    %dvt: f32[2, 3, 2, 4] = transpose %dv {perm = [0,2,1,3]} @backward
    %dq3: f32[2, 3, 8] = reshape %dqt {shape = [2,3,8]} @backward
    %dk3: f32[2, 3, 8] = reshape %dkt {shape = [2,3,8]} @backward
    %dv3: f32[2, 3, 8] = reshape %dvt {shape = [2,3,8]} @backward
    %dx: f32[2, 3, 24] = concat %dq3, %dk3, %dv3 {axis = 2} @backward
    return %e as "e"
    return %dx as "dx""#;

/// Whether strides express the layout of every operand and result of attention.
fn strided_attention(body: &Graph, kind: FusionKind) -> bool {
    kind != FusionKind::Attention
        || body.nodes().map(|(_, n)| n).any(|n| {
            matches!(n.op, Op::Attention(_) | Op::AttentionGrad(_))
                && n.inputs.iter().all(|v| strided::read(body, *v).is_some())
                && n.outputs.iter().all(|v| strided::written(body, *v).is_some())
        })
}

#[test]
fn attention_reads_and_writes_through_layout_operations() {
    let fused = fuse_with(
        Fuse { supported: strided_attention, ..Fuse::default() },
        &parse(PACKED_ATTENTION),
    );
    assert_eq!(
        outline(&fused),
        "attention(split reshape transpose reshape transpose reshape transpose attention transpose) \
         1->2; reshape; pointwise(exp) 1->1; reshape; attention(split reshape transpose reshape \
         transpose reshape transpose transpose transpose attention_grad transpose transpose \
         transpose reshape reshape reshape concat) 4->1"
    );
}

#[test]
fn attention_draws_the_mask_of_its_dropout() {
    let dropped = PACKED_ATTENTION
        .replace(
            "    %y: f32[2, 2, 3, 4], %l",
            r#"    %s: i64[5] = input {name = "s", ty = {"dtype":"i64","shape":[5]}}
    %m: bool[2, 6, 3] = random_mask %s {id = 0, keep = 0.5, shape = [2,6,3]}
    %kept: bool[2, 2, 3, 3] = reshape %m {shape = [2,2,3,3]}
    %y: f32[2, 2, 3, 4], %l"#,
        )
        .replace("%vt {causal = true,", "%vt, %kept {causal = true, keep = 0.5,")
        .replace("%l {causal = true,", "%l, %kept {causal = true, keep = 0.5,");
    let fused = fuse_with(Fuse { supported: |_, _| true, ..Fuse::default() }, &parse(&dropped));
    let outline = outline(&fused);
    let regions: Vec<&str> = outline.split("; ").filter(|l| l.starts_with("attention(")).collect();
    assert!(regions.len() == 2 && regions.iter().all(|l| l.contains("random_mask")), "{outline}");
    assert_eq!(outline.matches("random_mask").count(), 2, "{outline}");
}

#[test]
fn what_strides_do_not_reach_stays_outside_of_attention() {
    // The queries are also scaled, so their gradient is not an operand of the concat.
    let scaled = PACKED_ATTENTION
        .replace("transpose %dq {", "neg %dq {").replace(
            "%dqt: f32[2, 3, 2, 4] = neg %dq {perm = [0,2,1,3]}",
            "%dqn: f32[2, 2, 3, 4] = neg %dq @backward\n    %dqt: f32[2, 3, 2, 4] = transpose %dqn {perm = [0,2,1,3]}",
        );
    let fused =
        fuse_with(Fuse { supported: strided_attention, ..Fuse::default() }, &parse(&scaled));
    let outline = outline(&fused);
    let gradient = outline.split("; ").find(|l| l.contains("attention_grad")).unwrap();
    assert!(gradient.ends_with("4->3") && !gradient.contains("concat"), "{outline}");
    assert!(outline.ends_with("concat"), "{outline}");
    let never = fuse_with(
        Fuse { supported: |_, kind| !kind.is_library(), ..Fuse::default() },
        &parse(PACKED_ATTENTION),
    );
    assert!(never.nodes().any(|(_, n)| matches!(n.op, Op::AttentionGrad(_))));
}
