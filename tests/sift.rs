//! `gradprism filter` from end to end.

mod common;

use std::io::Write;
use std::path::Path;

use common::{StudyFolder, assert_close, fixture, gradprism, lines, stderr, synthetic_batch};
use serde_json::{Value, json};

const NO_POLICY: &str = "no policy is looked for.pt";

#[track_caller]
fn sift(folder: &StudyFolder, arguments: &[&str]) -> String {
    let output = folder.run_command("filter", arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(folder: &StudyFolder, arguments: &[&str], code: i32, says: &[&str]) {
    let output = folder.run_command("filter", arguments);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{stderr}");
    assert!(says.iter().all(|text| stderr.contains(text)), "`{stderr}` does not say {says:?}");
    assert!(output.stdout.is_empty());
    assert!(!folder.has_output(), "something was left behind");
}

fn kept(folder: &StudyFolder) -> Vec<u8> {
    std::fs::read(folder.path("out/kept.jsonl")).unwrap()
}

fn groups(folder: &StudyFolder) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.path("out/groups.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// A line as people and programs write them: `rest` is put in as it is.
fn line(group: &str, reward: &str, rest: &str) -> String {
    format!(
        "{{\"group_id\": \"{group}\",\"prompt_ids\":[1], \"response_ids\": [2, 3], \"reward\":{reward}{rest}}}"
    )
}

/// Four interleaved groups, with rewards variances 0.5, 0, 0.02 and 0.125, odd spaces, blank lines, two
/// kinds of line ends, and no newline at the end.
fn interleaved() -> (String, Vec<usize>) {
    let text = [
        format!("{}\r\n", line("a", "0", ", \"meta\": {\"é\": \"  \"}")),
        format!("{}\n", line("b", "0.5", "")),
        "\n".into(),
        format!("  {}  \n", line("a", "1.0", "")),
        format!("{}\n", line("c", "0.4", "")),
        format!("{}\n", line("d", "0.5", "")),
        format!("{}\n", line("b", "0.5", ", \"trajectory_id\": 7")),
        format!("{}\n", line("c", "0.60", "")),
        line("d", "1", ""),
    ];
    // Half of the mass of 0.645 is reached by `a` alone, 0.9 by `a` and `d`: lines 1, 4, 6 and 9.
    (text.concat(), vec![0, 3, 5, 8])
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn kept_lines_are_those_of_the_file_byte_for_byte() {
    let folder = StudyFolder::new(Path::new(NO_POLICY), &[], "");
    let (text, keeps) = interleaved();
    let expected: String = text
        .split_inclusive('\n')
        .enumerate()
        .filter(|(index, _)| keeps.contains(index))
        .map(|(_, line)| line)
        .collect();
    let plain = folder.path("rollouts.jsonl");
    write(&plain, text.as_bytes());
    let table = sift(&folder, &[]);
    assert_eq!(String::from_utf8(kept(&folder)).unwrap(), expected);
    assert!(table.contains("2 of 4 groups kept (4 of 8 trajectories)"), "{table}");
    let reasons: Vec<Value> = groups(&folder).iter().map(|group| group["reason"].clone()).collect();
    assert_eq!(reasons, ["chosen", "zero", "beyond_cut", "chosen"]);
    let found = groups(&folder);
    for (group, (variance, rank, held)) in found.iter().zip([
        (0.5, json!(1), Some(0.5 / 0.645)),
        (0.0, Value::Null, None),
        (0.02, json!(3), Some(1.0)),
        (0.125, json!(2), Some(0.625 / 0.645)),
    ]) {
        assert_close(number(&group["score"]), variance, 1e-12, 1.0, "score");
        assert_eq!(group["rank"], rank);
        match held {
            Some(held) => assert_close(number(&group["held_share"]), held, 1e-12, 1.0, "held"),
            None => assert!(group["held_share"].is_null()),
        }
    }
    assert_eq!(found[3]["lines"], json!([6, 9]));

    // A compressed file is what it holds.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    for bytes in [gzip.finish().unwrap(), zstd::encode_all(text.as_bytes(), 1).unwrap()] {
        write(&plain, &bytes);
        sift(&folder, &["--force"]);
        assert_eq!(String::from_utf8(kept(&folder)).unwrap(), expected);
    }

    // What is kept is a rollout file: filtered again by nothing it stays as it is.
    let output = gradprism(&["filter"])
        .arg(folder.path("study.yaml"))
        .arg("--out")
        .arg(folder.path("again"))
        .args(["--set", "filter.strategy=none", "--set"])
        .arg(format!("rollouts.path={}", folder.path("out/kept.jsonl").display()))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(std::fs::read(folder.path("again/kept.jsonl")).unwrap(), expected.as_bytes());
}

#[test]
fn what_the_reader_leaves_out_is_not_written() {
    let folder = StudyFolder::new(Path::new(NO_POLICY), &[], "");
    let text = [
        line("a", "0", ""),
        line("a", "1", ""),
        line("a", "1", ", \"response_mask\": [0, 0]"),
        line("a", "null", ""),
        line("alone", "1", ""),
    ];
    write(&folder.path("rollouts.jsonl"), text.join("\n").as_bytes());
    refused(&folder, &[], 1, &["rollouts.jsonl:4", "missing_reward"]);
    let drop = ["--set", "rollouts.missing_reward=drop", "--set", "rollouts.single=drop"];
    let output = folder.run_command("filter", &drop);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for warning in [
        "1 trajectories without a sampled token",
        "1 trajectories without a reward",
        "1 groups of one",
    ] {
        assert!(stderr(&output).contains(warning), "{}", stderr(&output));
    }
    assert_eq!(String::from_utf8(kept(&folder)).unwrap(), format!("{}\n{}\n", text[0], text[1]));
    let read = &folder.summary()["read"];
    assert_eq!((&read["without_sampled_token"], &read["dropped_single"]), (&json!(1), &json!(1)));
}

#[test]
fn an_empty_choice_under_each_on_empty() {
    let rows = lines(&synthetic_batch(3, 1));
    let folder =
        StudyFolder::new(Path::new(NO_POLICY), &rows, "filter: {strategy: threshold, value: 9}\n");
    refused(&folder, &["--set", "filter.on_empty=error"], 1, &["keeps no group", "keep_all"]);
    let output = folder.run_command("filter", &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("keeps no group"), "{}", stderr(&output));
    assert!(kept(&folder).is_empty());
    let step = &folder.summary()["steps"][0]["kept"];
    assert_eq!((&step["groups"], &step["optimizer_steps"]), (&json!(0), &json!(0)));
    assert!(step["cut"].is_null());
    sift(&folder, &["--force", "--set", "filter.on_empty=keep_all"]);
    assert_eq!(kept(&folder), std::fs::read(folder.path("rollouts.jsonl")).unwrap());
    assert!(groups(&folder).iter().all(|group| group["reason"] == "keep_all"));
}

/// Entropies are those that the study finds, and neither trainable parameters nor a reference policy is
/// needed for them.
#[test]
fn entropies_are_measured_by_forward_passes_alone() {
    let mut rows = lines(&synthetic_batch(5, 1));
    let yaml = "filter: {score: entropy, strategy: top_k_abs, value: 2}\n";
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &rows, yaml);
    assert_eq!(folder.run(&[]).status.code(), Some(0));
    let expected = number(&folder.summary()["steps"][0]["entropy_mean"]);
    let marked: Vec<Value> = folder.prompts().iter().map(|group| group["kept"].clone()).collect();
    sift(&folder, &["--force"]);
    let found = groups(&folder);
    let tokens: f64 = found.iter().map(|group| number(&group["tokens"])).sum();
    let sum: f64 =
        found.iter().map(|group| number(&group["entropy"]) * number(&group["tokens"])).sum();
    assert_close(sum / tokens, expected, 1e-6, expected, "mean entropy");
    let kept: Vec<Value> = found.iter().map(|group| group["kept"].clone()).collect();
    assert_eq!(kept, marked);
    assert!(found.iter().all(|group| group["score"] == group["entropy"]));
    sift(&folder, &["--force", "--set", "filter.score=entropy_variance"]);
    assert!(groups(&folder).iter().all(|group| number(&group["score"]) > 0.0));

    for row in &mut rows {
        row.as_object_mut().unwrap().remove("ref_logprobs");
    }
    let frozen = StudyFolder::new(&fixture("no_grad.pt"), &rows, yaml);
    assert_eq!(frozen.run(&[]).status.code(), Some(1));
    sift(&frozen, &[]);
    assert_eq!(groups(&frozen).len(), 5);
}

/// A measured score comes from a study, whose lines are written too.
#[test]
fn measured_scores_are_those_of_the_study() {
    let mut rows = lines(&synthetic_batch(6, 2));
    // Two steps of three groups, so that the history of the keep rate shows in both.
    for (index, row) in rows.iter_mut().enumerate() {
        row["step"] = json!(index / 12);
    }
    let yaml = "filter: {score: snr, value: 0.7, adaptive: {}, loss_scale: linear}\n";
    let folder = StudyFolder::new(&fixture("gpt2.pt"), &rows, yaml);
    assert_eq!(folder.run(&[]).status.code(), Some(0));
    let (study, summary) = (folder.prompts(), folder.summary());
    let table = sift(&folder, &["--force"]);
    assert!(table.contains("by snr"), "{table}");
    assert_eq!(folder.prompts(), study);
    for (group, prompt) in groups(&folder).iter().zip(&study) {
        for (key, of_study) in [
            ("group_id", "group_id"),
            ("score", "snr"),
            ("kept", "kept"),
            ("signal_sq", "signal_sq"),
        ] {
            assert_eq!(group[key], prompt[of_study], "{key}");
        }
    }
    for step in 0..2 {
        let kept = &summary["steps"][step]["kept"];
        assert!(number(&kept["keep_rate"]) >= 0.7 && !kept["adaptive_spread"].is_null());
        assert_eq!(folder.summary()["steps"][step]["kept"], *kept);
    }
    sift(&folder, &["--force", "--set", "filter.score=signal"]);
    for (group, prompt) in groups(&folder).iter().zip(&study) {
        let signal = number(&prompt["signal_sq"]).max(0.0).sqrt();
        assert_close(number(&group["score"]), signal, 1e-12, 1.0, "signal");
    }
}

/// Two steps of four groups: spreads 2 and 0, so that with momentum 0.5 the second is kept at the rate
/// of the average 1.
fn two_steps() -> Vec<Value> {
    let mut rows = Vec::new();
    for step in [3, 10] {
        for group in 0..4 {
            for row in 0..2 {
                let varies = step == 10 || group == 0;
                let reward = if varies { row } else { 0 };
                rows.push(json!({"step": step, "group_id": group, "prompt_ids": [1], "response_ids": [2], "reward": reward}));
            }
        }
    }
    rows
}

#[test]
fn an_adaptive_rate_and_its_record_step_by_step() {
    let yaml =
        "filter: {value: 0.5, adaptive: {momentum: 0.5}, loss_scale: sqrt, mini_batch_size: 2}\n";
    let folder = StudyFolder::new(Path::new(NO_POLICY), &two_steps(), yaml);
    let table = sift(&folder, &[]);
    assert!(table.contains("step 10") && table.contains("optimiser steps left: 1 of 2"), "{table}");
    let steps = folder.summary()["steps"].clone();
    let rate = 1.0 - 0.5 * (1.0 - 0.33) / (1.16 - 0.33);
    for (step, (spread, averaged, rate, groups, left)) in
        steps.as_array().unwrap().iter().zip([(2.0, 2.0, 0.5, 1, 1), (0.0, 1.0, rate, 3, 2)])
    {
        let kept = &step["kept"];
        for (key, expected) in [
            ("reward_variance_spread", spread),
            ("adaptive_spread", averaged),
            ("keep_rate", rate),
            ("loss_factor", (f64::from(groups) / 4.0).sqrt()),
        ] {
            assert_close(number(&kept[key]), expected, 1e-12, 1.0, key);
        }
        assert_eq!((&kept["groups"], &kept["optimizer_steps"]), (&json!(groups), &json!(left)));
        assert_eq!(kept["optimizer_steps_unfiltered"], 2);
    }
    for step in [3, 10] {
        assert!(folder.path(&format!("out/score_by_rank-{step}.png")).exists());
    }
}

#[test]
fn the_picture_shows_what_is_kept_and_why() {
    let folder = StudyFolder::new(
        Path::new(NO_POLICY),
        &[],
        "filter: {score: reward, strategy: top_k_abs, value: 1}\n",
    );
    let rewards = [("a", "1"), ("b", "-1"), ("c", "0")];
    let text: Vec<String> = rewards
        .iter()
        .flat_map(|(group, reward)| [line(group, reward, ""), line(group, reward, ", \"meta\": 1")])
        .collect();
    write(&folder.path("rollouts.jsonl"), text.join("\n").as_bytes());
    sift(&folder, &[]);
    let file = std::fs::File::open(folder.path("out/score_by_rank.png")).unwrap();
    let mut reader = png::Decoder::new(std::io::BufReader::new(file)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let at = |x: usize, y: usize| &pixels[(y * 640 + x) * 3..][..3];
    // Ranks 1, 2, 3 of 3 at x = 260, 440, 620 and scores 1, −1, 0 at y = 50, 400, 225: a disc, a ring,
    // and a ring in the strong color.
    assert_eq!(at(260, 50), [90, 130, 180], "kept");
    assert_eq!(at(440, 400), [225, 225, 225], "beyond the cut: the grid shows through the ring");
    assert_eq!(at(440, 396), [90, 130, 180]);
    assert_eq!(at(620, 221), [200, 60, 20], "a score of 0");
}

#[test]
fn nothing_is_overwritten_and_nothing_half_written() {
    let folder = StudyFolder::new(Path::new(NO_POLICY), &lines(&synthetic_batch(3, 1)), "");
    let json = sift(&folder, &["--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json, folder.summary());
    assert_eq!(json["score"], "reward_variance");
    let mut names: Vec<String> = std::fs::read_dir(folder.path("out"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("events.out.tfevents."))
        .collect();
    names.sort();
    assert_eq!(
        names,
        ["config.resolved.yaml", "groups.jsonl", "kept.jsonl", "score_by_rank.png", "summary.json"]
    );
    let before = kept(&folder);
    let output = folder.run_command("filter", &["--set", "filter.strategy=none"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--force"), "{}", stderr(&output));
    assert_eq!(kept(&folder), before);
    // Its own output as input would be removed by what replaces it.
    let own = format!("rollouts.path={}", folder.path("out/kept.jsonl").display());
    let output = folder.run_command("filter", &["--force", "--set", &own]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("which this run reads"), "{}", stderr(&output));
    assert_eq!(kept(&folder), before);
    let output = folder.run_command("filter", &["--force", "--quiet"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.is_empty() && output.stderr.is_empty());
    assert_eq!(kept(&folder), before);
}

#[test]
fn what_cannot_be_asked_for() {
    let folder = StudyFolder::new(Path::new(NO_POLICY), &lines(&synthetic_batch(3, 1)), "");
    let set = |text: &str, code: i32, says: &[&str]| refused(&folder, &["--set", text], code, says);
    set("filter.direction=up", 2, &["filter.direction", "highest"]);
    set("filter.epsilon=-1", 2, &["filter.epsilon", "at least 0"]);
    set("filter.compat=verl", 2, &["filter.compat", "ragen"]);
    set("filter.mini_batch_size=0", 2, &["filter.mini_batch_size", "at least 1"]);
    set("filter.loss_scale=cubic", 2, &["filter.loss_scale", "sqrt"]);
    set("filter.adaptive={low: 2}", 2, &["filter.adaptive", "low < high"]);
    set("filter.adaptive={lows: 2}", 2, &["filter.adaptive", "low"]);
    set("filter.adaptive={momentum: 1.0}", 2, &["filter.adaptive", "momentum < 1"]);
    set("rollouts.path=/", 1, &["expected a file"]);
    set("rollouts.path=/nowhere.jsonl", 1, &["/nowhere.jsonl"]);
    set("filter.score=entropy", 1, &["no such file"]);
    set("filter.score=snr", 1, &["no such file"]);
    let both = |one: &str, other: &str, says: &[&str]| {
        refused(&folder, &["--set", one, "--set", other], 2, says);
    };
    both("filter.adaptive={}", "filter.strategy=top_k", &["filter.adaptive", "top_k"]);
    both("filter.adaptive={}", "filter.compat=ragen", &["filter.adaptive", "filter.compat"]);
    both("filter.compat=ragen", "filter.strategy=threshold", &["filter.compat", "threshold"]);
    let policies = format!("policy.checkpoint=[{0}, {0}]", fixture("gpt2.pt").display());
    both(&policies, "filter.score=entropy", &["policy.checkpoint", "one checkpoint"]);
}

#[test]
fn tensorboard_reads_what_was_kept() {
    let Some(python) = common::python("tensorboard_reads_what_was_kept") else { return };
    let folder = StudyFolder::new(Path::new(NO_POLICY), &two_steps(), "filter: {value: 0.5}\n");
    sift(&folder, &[]);
    const SCRIPT: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
run = EventAccumulator(sys.argv[1], size_guidance={"images": 0, "scalars": 0})
run.Reload()
scalars = {tag: [[e.step, e.value] for e in run.Scalars(tag)] for tag in run.Tags()["scalars"]}
images = [[i.step, i.width, i.height] for i in run.Images("filter/score_by_rank")]
print(json.dumps({"scalars": scalars, "images": images}))
"#;
    let output = std::process::Command::new(python)
        .args(["-c", SCRIPT])
        .arg(folder.path("out"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(read["scalars"]["filter/kept_groups"], json!([[3, 1.0], [10, 2.0]]));
    assert_eq!(read["scalars"]["filter/reward_variance_spread"], json!([[3, 2.0], [10, 0.0]]));
    assert_eq!(read["scalars"]["filter/optimizer_steps"], json!([[3, 1.0], [10, 1.0]]));
    assert_eq!(read["images"], json!([[3, 640, 480], [10, 640, 480]]));
}

/// Ctrl-C: a part of the groups judged is no filtered file.
#[cfg(unix)]
#[test]
fn an_interrupted_filter_leaves_nothing() {
    for score in ["entropy", "snr"] {
        let yaml = format!("filter: {{score: {score}}}\n");
        let rows = lines(&synthetic_batch(4000, 1));
        let folder = StudyFolder::new(&fixture("gpt2.pt"), &rows, &yaml);
        let mut command = gradprism(&["filter"]);
        command.arg(folder.path("study.yaml")).arg("--out").arg(folder.path("out")).arg("--quiet");
        let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
        // The staging directory appears when the work begins.
        while !folder.path("out/.partial").exists() {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it began");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let id = child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{score}");
        assert!(!folder.has_output(), "something was left behind");
    }
}
