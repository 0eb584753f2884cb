//! The reader of native JSONL: what it accepts, and that every breach is named by line and field.

mod common;

use std::io::Write;
use std::path::Path;

use gradprism::policy::PolicyKind;
use gradprism::rollout::{Content, OnProblem, ReadOptions, Rollouts, read};
use gradprism::{Error, Result};
use proptest::prelude::*;
use serde_json::{Value, json};

fn options() -> ReadOptions {
    ReadOptions {
        kind: PolicyKind::CausalLm,
        tokenizer: None,
        single: OnProblem::Error,
        missing_reward: OnProblem::Error,
    }
}

fn read_bytes(bytes: &[u8], options: &ReadOptions) -> Result<Rollouts> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    read(file.path(), options)
}

fn read_lines(lines: &[Value], options: &ReadOptions) -> Result<Rollouts> {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    read_bytes(text.as_bytes(), options)
}

fn line(group: &str, reward: f64) -> Value {
    json!({"group_id": group, "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "reward": reward})
}

/// Two good lines, the second changed.
fn with(change: impl Fn(&mut Value)) -> Vec<Value> {
    let mut lines = vec![line("a", 0.0), line("a", 1.0)];
    change(&mut lines[1]);
    lines
}

/// The line, field and problem of a refusal.
#[track_caller]
fn refusal(outcome: Result<Rollouts>) -> (usize, String, String) {
    match outcome {
        Err(Error::RolloutLine { line, field, problem, .. }) => (line, field, problem),
        other => panic!("expected a refusal of a line, found {other:?}"),
    }
}

#[track_caller]
fn assert_refused(change: impl Fn(&mut Value), field: &str, says: &str) {
    let (line, found, problem) = refusal(read_lines(&with(change), &options()));
    assert_eq!((line, found.as_str()), (2, field), "{problem}");
    assert!(problem.contains(says), "`{problem}` does not say `{says}`");
}

#[test]
fn a_full_line_is_read_whole() {
    let full = json!({
        "group_id": "p-17", "trajectory_id": "p-17/3", "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5], "response_mask": [1, 0, 1], "reward": 1.0,
        "old_logprobs": [-1.2, null, -0.1], "ref_logprobs": [-1.1, -0.4, -0.2],
        "sampler_logprobs": [-1.2, -0.3, -0.1], "values": [0.1, 0.2, 0.4],
        "token_rewards": [0.25, null, 0.75], "reasoning": [[0, 2]], "step": 40,
        "prompt": "text", "response": "text", "meta": {"any": "thing"}
    });
    let mut other = full.clone();
    other["trajectory_id"] = json!(4);
    let rollouts = read_lines(&[full, other], &options()).unwrap();
    assert_eq!(rollouts.batches.len(), 1);
    assert_eq!(rollouts.batches[0].step, Some(40));
    let row = &rollouts.batches[0].groups[0].trajectories[0];
    assert_eq!(row.line, 1);
    assert_eq!(row.id.as_deref(), Some("p-17/3"));
    assert_eq!(
        row.content,
        Content::Tokens { prompt_ids: vec![1, 2], response_ids: vec![3, 4, 5] }
    );
    assert_eq!(row.mask, [true, false, true]);
    assert_eq!(row.reward, 1.0);
    assert_eq!(row.token_rewards.as_deref(), Some([0.25, 0.0, 0.75].as_slice()));
    assert_eq!(row.old_logprobs.as_deref(), Some([-1.2, 0.0, -0.1].as_slice()));
    // What stands outside the mask is nobody's number.
    assert_eq!(row.ref_logprobs.as_deref(), Some([-1.1, 0.0, -0.2].as_slice()));
    assert_eq!(row.reasoning.as_deref(), Some([(0, 2)].as_slice()));
    assert_eq!(rollouts.batches[0].groups[0].trajectories[1].id.as_deref(), Some("4"));
}

#[test]
fn groups_are_kept_apart_by_step_and_steps_are_ordered() {
    let mut lines = Vec::new();
    for (step, group) in
        [(2, "a"), (1, "b"), (2, "b"), (1, "a"), (2, "a"), (1, "b"), (2, "b"), (1, "a")]
    {
        let mut line = line(group, lines.len() as f64);
        line["step"] = json!(step);
        lines.push(line);
    }
    let rollouts = read_lines(&lines, &options()).unwrap();
    let found: Vec<String> = rollouts
        .batches
        .iter()
        .flat_map(|batch| {
            batch.groups.iter().map(|group| {
                let lines: Vec<usize> = group.trajectories.iter().map(|row| row.line).collect();
                format!("step {} group {} lines {lines:?}", batch.step.unwrap(), group.id)
            })
        })
        .collect();
    assert_eq!(
        found,
        [
            "step 1 group b lines [2, 6]",
            "step 1 group a lines [4, 8]",
            "step 2 group a lines [1, 5]",
            "step 2 group b lines [3, 7]",
        ]
    );
}

#[test]
fn compressed_files_are_told_by_their_first_bytes() {
    let text = format!("{}\n{}\n", line("a", 0.0), line("a", 1.0));
    let plain = read_bytes(text.as_bytes(), &options()).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    assert_eq!(read_bytes(&gzip, &options()).unwrap(), plain);
    let zstd = zstd::encode_all(text.as_bytes(), 0).unwrap();
    assert_eq!(read_bytes(&zstd, &options()).unwrap(), plain);
    // Cut short, neither is half-read.
    assert!(matches!(read_bytes(&gzip[..gzip.len() / 2], &options()), Err(Error::Io { .. })));
    assert!(matches!(read_bytes(&zstd[..zstd.len() / 2], &options()), Err(Error::Io { .. })));
}

#[test]
fn blank_lines_a_byte_order_mark_and_windows_ends_do_no_harm() {
    let text = format!("\u{feff}{}\r\n\r\n{}\r\n\n", line("a", 0.0), line("a", 1.0));
    let rollouts = read_bytes(text.as_bytes(), &options()).unwrap();
    assert_eq!(rollouts.batches[0].groups[0].trajectories[1].line, 3);
}

#[test]
fn every_breach_is_named_by_line_and_field() {
    let set = |key: &'static str, value: Value| move |line: &mut Value| line[key] = value.clone();
    assert_refused(set("response_ids", json!([])), "response_ids", "at least one token id");
    assert_refused(set("prompt_ids", json!([])), "prompt_ids", "at least one token id");
    assert_refused(set("response_ids", json!([3, -1, 5])), "response_ids[1]", "found -1");
    assert_refused(set("response_ids", json!([3, "x", 5])), "response_ids[1]", "string \"x\"");
    assert_refused(set("response_ids", json!([3, 1.5, 5])), "response_ids[1]", "1.5");
    assert_refused(set("response_mask", json!([1, 1])), "response_mask", "expected 3 entries");
    assert_refused(set("response_mask", json!([1, 2, 1])), "response_mask[1]", "expected 0, 1");
    assert_refused(set("reward", json!("1.0")), "reward", "expected a number or null");
    assert_refused(set("reward", Value::Null), "reward", "rollouts.missing_reward");
    assert_refused(set("group_id", Value::Null), "group_id", "found null");
    assert_refused(set("reasoning", json!([[2, 1]])), "reasoning[0]", "start <= end");
    assert_refused(set("reasoning", json!([[0, 4]])), "reasoning[0]", "end <= 3");
    assert_refused(set("rewrad", json!(1)), "rewrad", "did you mean `reward`");
    assert_refused(set("actions", json!([1])), "actions", "policy.kind: step");
    assert_refused(set("step", json!(3)), "step", "line 2 has it, line 1 does not");
    assert_refused(set("token_rewards", json!([0, 0, 0.5])), "reward", "expected 0.5");
    assert_refused(
        |line| {
            line["response_mask"] = json!([1, 0, 1]);
            line["token_rewards"] = json!([0, 0.5, 0.5]);
        },
        "token_rewards[1]",
        "put it on the sampled token",
    );
    assert_refused(
        |line| {
            line.as_object_mut().unwrap().remove("reward");
        },
        "reward",
        "found neither",
    );
    assert_refused(
        |line| {
            line.as_object_mut().unwrap().remove("response_ids");
        },
        "response_ids",
        "expected an array of token ids",
    );
    assert_refused(
        |line| {
            line.as_object_mut().unwrap().remove("response_ids");
            line["response"] = json!("text");
        },
        "response_ids",
        "rollouts.tokenizer",
    );
}

#[test]
fn arrays_over_the_response_are_finite_where_it_was_sampled() {
    for field in ["old_logprobs", "ref_logprobs", "sampler_logprobs", "values"] {
        let lines = |second: &str, mask: &str| {
            let line = |array: &str| {
                format!(
                    r#"{{"group_id":"a","prompt_ids":[1],"response_ids":[2,3],"reward":0,"response_mask":{mask},"{field}":{array}}}"#
                )
            };
            format!("{}\n{}\n", line("[-0.5, -0.5]"), line(second)).into_bytes()
        };
        for bad in ["NaN", "null", "Infinity", "-Infinity"] {
            let array = format!("[-0.5, {bad}]");
            let (line, found, problem) = refusal(read_bytes(&lines(&array, "[1,1]"), &options()));
            assert_eq!((line, found), (2, format!("{field}[1]")), "{problem}");
            assert!(problem.contains("finite number where response_mask is 1"), "{problem}");
            // Outside the mask it is nobody's number.
            assert!(read_bytes(&lines(&array, "[1,0]"), &options()).is_ok(), "{field} {bad}");
        }
        let (_, found, problem) = refusal(read_bytes(&lines("[-0.5]", "[1,1]"), &options()));
        assert_eq!(found, field);
        assert!(problem.contains("expected 2 entries"), "{problem}");
    }
    let lines = with(|line| line["old_logprobs"] = json!([-1.0, -1.0, -1.0]));
    let (_, field, problem) = refusal(read_lines(&lines, &options()));
    assert_eq!(field, "old_logprobs");
    assert!(problem.contains("in all lines or in none"), "{problem}");
    let mut lines = with(|line| line["old_logprobs"] = json!([-1.0, 0.7, -1.0]));
    lines[0]["old_logprobs"] = json!([-1.0, -1.0, -1.0]);
    let (_, field, problem) = refusal(read_lines(&lines, &options()));
    assert_eq!(field, "old_logprobs[1]");
    assert!(problem.contains("at most 0, found 0.7"), "{problem}");
}

#[test]
fn missing_and_infinite_rewards() {
    let text = |reward: &str| {
        let line = |reward: &str| {
            format!(r#"{{"group_id":"a","prompt_ids":[1],"response_ids":[2],"reward":{reward}}}"#)
        };
        format!("{}\n{}\n{}\n", line("0"), line("1"), line(reward)).into_bytes()
    };
    let drop = ReadOptions { missing_reward: OnProblem::Drop, ..options() };
    for missing in ["NaN", "null"] {
        let (line, field, _) = refusal(read_bytes(&text(missing), &options()));
        assert_eq!((line, field.as_str()), (3, "reward"));
        let rollouts = read_bytes(&text(missing), &drop).unwrap();
        assert_eq!(rollouts.batches[0].groups[0].trajectories.len(), 2);
        assert_eq!(rollouts.report.dropped_missing_reward, 1);
    }
    for infinite in ["Infinity", "-Infinity", "1e999", "1e200"] {
        for options in [&options(), &drop] {
            let (line, _, problem) = refusal(read_bytes(&text(infinite), options));
            assert_eq!(line, 3, "{problem}");
        }
    }
}

/// Split over tokens differently, equal rewards stay equal: .1 + .2 is not .3 in binary.
#[test]
fn token_rewards_that_sum_to_the_same_are_the_same_reward() {
    let row = |rewards: Value| json!({"group_id": "a", "prompt_ids": [1], "response_ids": [2, 3], "token_rewards": rewards});
    let rollouts =
        read_lines(&[row(json!([0.1, 0.2])), row(json!([0.3, 0.0]))], &options()).unwrap();
    assert_eq!(rollouts.batches[0].groups[0].rewards(), [0.3, 0.3]);
}

#[test]
fn groups_of_one_and_rows_without_a_sampled_token() {
    let lines = [line("a", 0.0), line("b", 1.0), line("a", 1.0)];
    let (line_number, field, problem) = refusal(read_lines(&lines, &options()));
    assert_eq!((line_number, field.as_str()), (2, "group_id"));
    assert!(problem.contains("found one in `b`") && problem.contains("rollouts.single"));
    let drop = ReadOptions { single: OnProblem::Drop, ..options() };
    let rollouts = read_lines(&lines, &drop).unwrap();
    assert_eq!(rollouts.batches[0].groups.len(), 1);
    assert_eq!(rollouts.report.dropped_single, 1);
    assert!(read_lines(&[line("a", 0.0), line("b", 0.0)], &drop).is_err());

    // A row without a sampled token counts nowhere: here it leaves a group of one.
    let mut silent = line("a", 1.0);
    silent["response_mask"] = json!([0, 0, 0]);
    let rollouts =
        read_lines(&[line("a", 0.0), silent.clone(), line("a", 1.0)], &options()).unwrap();
    assert_eq!(rollouts.report.without_sampled_token, 1);
    assert_eq!(rollouts.batches[0].groups[0].trajectories.len(), 2);
    assert!(read_lines(&[line("a", 0.0), silent], &options()).is_err());
}

#[test]
fn repeated_names_are_refused_and_repeated_lines_counted() {
    let named = |name: &str| {
        let mut line = line("a", 0.0);
        line["trajectory_id"] = json!(name);
        line
    };
    let (line_number, field, problem) =
        refusal(read_lines(&[named("x"), named("y"), named("x")], &options()));
    assert_eq!((line_number, field.as_str()), (3, "trajectory_id"));
    assert!(problem.contains("as on line 1"), "{problem}");
    let rollouts =
        read_lines(&[line("a", 0.0), line("a", 0.0), line("a", 1.0)], &options()).unwrap();
    assert_eq!(rollouts.report.repeated_lines, 1);
}

#[test]
fn unequal_prompts_in_a_group_are_counted() {
    let lines = with(|line| line["prompt_ids"] = json!([1, 9]));
    assert_eq!(read_lines(&lines, &options()).unwrap().report.groups_of_unequal_prompts, 1);
}

#[test]
fn broken_files_are_refused() {
    for (bytes, says) in [
        (b"".as_slice(), "found an empty file"),
        (b"\n\n", "found an empty file"),
        (b"{\"group_id\": \"a\"", "one JSON object a line"),
        (b"[1, 2]\n", "one JSON object a line"),
        (b"{\"group_id\":\"\xef\xa3\xbfNaN\"}\n", "U+F8FF"),
        (b"{\"group_id\":\"a\\u001b[31m\"}\n", "without control characters"),
        (b"{} {}\n", "missing field `group_id`"),
        (b"\xff\xfe{}\n", "expected UTF-8"),
        (b"{\"group_id\":\"a\",\"group_id\":\"b\"}\n", "duplicate field `group_id`"),
    ] {
        let error = read_bytes(bytes, &options()).unwrap_err().to_string();
        assert!(error.contains(says), "`{error}` does not say `{says}`");
    }
    let missing = read(Path::new("no/such/file.jsonl"), &options()).unwrap_err().to_string();
    assert!(missing.contains("cannot read no/such/file.jsonl"), "{missing}");
}

#[test]
fn step_rollouts_have_rectangular_observations() {
    let options = ReadOptions { kind: PolicyKind::Step, ..options() };
    let line = |observations: Value| json!({"group_id": "a", "observations": observations, "actions": [0, 1], "reward": 1.0});
    let good = line(json!([[[1, 2], [3, 4]], [[5, 6], [7, 8.5]]]));
    let rollouts = read_lines(&[good.clone(), good.clone()], &options).unwrap();
    let Content::Steps { observations, shape, actions } =
        &rollouts.batches[0].groups[0].trajectories[0].content
    else {
        panic!("steps were read")
    };
    assert_eq!(shape, &[2, 2]);
    assert_eq!(actions, &[0, 1]);
    assert_eq!(observations, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5]);
    for (bad, says) in [
        (json!([[1, 2], [3]]), "equal length"),
        (json!([[1, 2], 3]), "found the number 3"),
        (json!([1, [2]]), "found an array"),
        (json!([[1, 2], [3, "x"]]), "finite numbers"),
        (json!([[1, 2]]), "expected 2 entries"),
        (json!(1), "expected an array"),
    ] {
        let (_, field, problem) = refusal(read_lines(&[good.clone(), line(bad)], &options));
        assert_eq!(field, "observations");
        assert!(problem.contains(says), "`{problem}` does not say `{says}`");
    }
}

#[test]
fn text_is_tokenised_and_must_fit_its_arrays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 3, "content": "<end>", "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "three": 2, "<end>": 3, "?": 4},
            "unk_token": "?"}
    });
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let options = ReadOptions { tokenizer: Some(path), ..options() };
    let mut line = json!({"group_id": "a", "prompt": "one two", "response": "three<end>",
        "reward": 0, "old_logprobs": [-1, -2]});
    let rollouts = read_lines(&[line.clone(), line.clone()], &options).unwrap();
    assert_eq!(
        rollouts.batches[0].groups[0].trajectories[0].content,
        Content::Tokens { prompt_ids: vec![0, 1], response_ids: vec![2, 3] }
    );
    line["old_logprobs"] = json!([-1]);
    let (_, field, _) = refusal(read_lines(&[line], &options));
    assert_eq!(field, "old_logprobs");
}

proptest! {
    /// Whatever stands in the file: an answer or a refusal, never a panic.
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_bytes(&bytes, &options());
    }

    /// A good file with some bytes replaced.
    #[test]
    fn a_damaged_file_never_panics(at in 0_usize..300, byte in any::<u8>()) {
        let mut line = line("a", 0.5);
        line["old_logprobs"] = json!([-1.0, -1e-3, -30.5]);
        line["reasoning"] = json!([[0, 1], [2, 3]]);
        let mut bytes = format!("{line}\n{line}\n").into_bytes();
        let length = bytes.len();
        bytes[at % length] = byte;
        for kind in [PolicyKind::CausalLm, PolicyKind::Step] {
            let _ = read_bytes(&bytes, &ReadOptions { kind, ..options() });
        }
    }
}
