//! `gradprism diagnose` from end to end.

mod common;

use std::path::{Path, PathBuf};
use std::process::Output;

use common::{
    StudyFolder, assert_close, config, fixture, gradprism, lines, stderr, synthetic_batch,
    write_lines,
};
use serde_json::{Value, json};

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn read_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// Diagnoses the folder's rollouts into `out`.
fn diagnose(folder: &StudyFolder, arguments: &[&str]) -> Output {
    folder.run_command("diagnose", arguments)
}

#[track_caller]
fn diagnosis(folder: &StudyFolder, arguments: &[&str]) -> Value {
    let output = diagnose(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    read(&folder.path("out/diagnosis.json"))
}

fn gpt2(rows: &[Value], yaml: &str) -> StudyFolder {
    StudyFolder::new(&fixture("gpt2.pt"), rows, yaml)
}

fn good_lines() -> Vec<Value> {
    let mut rows = lines(&synthetic_batch(4, 1));
    for row in &mut rows {
        // The fixture is not the policy that wrote them.
        row.as_object_mut().unwrap().remove("old_logprobs");
    }
    rows
}

/// The rows of the quickstart, with a step and a name for it.
fn quickstart_lines(step: usize) -> Vec<Value> {
    let mut rows = read_lines(&config("quickstart/rollouts.jsonl"));
    for row in &mut rows {
        row["step"] = json!(step);
        row["trajectory_id"] = json!(format!("{step}:{}", row["trajectory_id"].as_str().unwrap()));
        for key in ["old_logprobs", "ref_logprobs"] {
            row.as_object_mut().unwrap().remove(key);
        }
    }
    rows
}

#[test]
fn the_quickstart_reads_its_input() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let run = |extra: &[&str]| {
        let mut command = gradprism(&["diagnose"]);
        command.arg(config("quickstart.yaml")).arg("--out").arg(&out).args(extra);
        command.output().unwrap()
    };
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    assert!(
        said.contains("scoring 902 sequences (41 distinct spans under 22 distinct contexts)"),
        "{said}"
    );
    assert!(said.contains("902/902 sequences"), "{said}");
    assert!(!said.contains("WARN"), "{said}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("192/192") && table.contains("no baseline yet"), "{table}");

    let report = read(&out.join("diagnosis.json"));
    assert_eq!((&report["format"], &report["partial"]), (&json!(1), &json!(false)));
    let step = &report["steps"][0];
    let metrics = &step["metrics"];
    // A sum tells its answer: every answer is told by its sum.
    assert_eq!(number(&metrics["retrieval_accuracy"]), 1.0);
    assert_close(number(&metrics["retrieval_chance_level"]), 1.0 / 22.0, 1e-12, 1.0, "chance");
    let bound = number(&metrics["mi_upper_bound"]);
    assert_close(number(&metrics["mi_seq_estimate"]), bound, 1e-3, bound, "all there is to know");
    // H(Z) = I(X; Z) + H(Z | X), under either marginal.
    for marginal in ["paper", "code"] {
        let token = &step["by_marginal"][marginal];
        let sum = number(&token["mi_estimate"]) + number(&metrics["conditional_entropy_est"]);
        assert_close(number(&token["reasoning_entropy_est"]), sum, 1e-9, 1.0, marginal);
    }
    assert_eq!(metrics["mi_estimate"], step["by_marginal"]["paper"]["mi_estimate"]);
    // The file's own log-probabilities are this policy's.
    assert!(number(&step["old_logprobs_gap"]) < 1e-5);
    // After one step the running mean is the step.
    assert_eq!(step["marginal_std_ema"], metrics["marginal_std"]);
    let rows = read_lines(&out.join("scores.jsonl"));
    assert_eq!(rows.len(), 64);
    let own =
        |row: &Value| number(&row["log_likelihood"][row["column"].as_u64().unwrap() as usize]);
    let entropy = rows.iter().map(|row| -own(row)).sum::<f64>() / 64.0;
    assert_close(
        number(&metrics["conditional_entropy_seq_est"]),
        entropy,
        1e-12,
        entropy,
        "H(Z|X)",
    );

    // The same discipline as a study's: no second run without --force, and the same files with it.
    let kept = ["config.resolved.yaml", "scores.jsonl", "state.json"]
        .map(|name| std::fs::read(out.join(name)).unwrap());
    let refused = run(&[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("--force"), "{}", stderr(&refused));
    let again = run(&["--force", "--json", "--quiet"]);
    assert_eq!(again.status.code(), Some(0));
    assert!(again.stderr.is_empty());
    let printed: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(printed["steps"], report["steps"]);
    for (name, before) in ["config.resolved.yaml", "scores.jsonl", "state.json"].iter().zip(kept) {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), before, "{name}");
    }
    // The other marginal, all spans.
    let code = run(&[
        "--force",
        "--quiet",
        "--set",
        "diagnostics.marginal=code",
        "--set",
        "diagnostics.samples=null",
    ]);
    assert_eq!(code.status.code(), Some(0), "{}", stderr(&code));
    let step = &read(&out.join("diagnosis.json"))["steps"][0];
    assert_eq!(step["metrics"]["mi_estimate"], step["by_marginal"]["code"]["mi_estimate"]);
    assert_eq!(step["cost"]["rows"], 192);
}

/// Six healthy steps, and two whose answers are those of other sums.
fn collapsing_steps() -> Vec<Value> {
    let mut all = Vec::new();
    for step in 0..8 {
        let mut rows = quickstart_lines(step);
        if step >= 6 {
            let shift = rows.len() / 2;
            let answers: Vec<Value> = rows.iter().map(|row| row["response_ids"].clone()).collect();
            for (index, row) in rows.iter_mut().enumerate() {
                let answer = &answers[(index + shift) % answers.len()];
                row["response_ids"] = answer.clone();
                row.as_object_mut().unwrap().remove("response_mask");
                row.as_object_mut().unwrap().remove("response");
            }
        }
        all.extend(rows);
    }
    all
}

#[test]
fn template_collapse_is_found_across_a_restart() {
    let policy = config("quickstart/policy.pt");
    let all = collapsing_steps();
    let of_steps = |low: usize, high: usize| -> Vec<Value> {
        let inside = |row: &&Value| (low..high).contains(&(row["step"].as_u64().unwrap() as usize));
        all.iter().filter(inside).cloned().collect()
    };
    // In one run.
    let whole = StudyFolder::new(&policy, &all, "");
    let report = diagnosis(&whole, &[]);
    let steps = report["steps"].as_array().unwrap();
    let regimes: Vec<Option<&str>> = steps.iter().map(|step| step["regime"].as_str()).collect();
    let (diverse, collapsed) = (Some("diverse"), Some("template_collapse"));
    assert_eq!(regimes, [None, None, None, None, diverse, diverse, collapsed, collapsed]);
    let alarms: Vec<&Value> = steps.iter().map(|step| &step["alarm"]).collect();
    assert!(alarms[..6].iter().all(|alarm| **alarm == false), "{alarms:?}");
    assert!(alarms[6..].iter().all(|alarm| **alarm == true), "{alarms:?}");
    assert!(number(&steps[7]["metrics"]["retrieval_accuracy"]) < 0.2);

    // In two, with the state between them; then the second one again.
    let parts = StudyFolder::new(&policy, &of_steps(0, 3), "diagnostics: {state: past.json}\n");
    let first = diagnosis(&parts, &[]);
    assert_eq!(first["steps"].as_array().unwrap().len(), 3);
    for _ in 0..2 {
        write_lines(&parts.path("rollouts.jsonl"), &of_steps(3, 8));
        let second = diagnosis(&parts, &["--force"]);
        let again = second["steps"].as_array().unwrap();
        assert_eq!(again.len(), 5);
        for (found, expected) in again.iter().zip(&steps[3..]) {
            assert!(found == expected, "step {}", expected["step"]);
        }
        assert_eq!(read(&parts.path("past.json")), read(&whole.path("out/state.json")));
    }

    // Against the baseline of another run, from its first step on.
    let file = parts.path("past.json");
    let mut healthy = read(&file);
    healthy["entries"].as_array_mut().unwrap().truncate(6);
    std::fs::write(&file, healthy.to_string()).unwrap();
    let late = StudyFolder::new(&policy, &of_steps(6, 8), "");
    let baseline = format!("diagnostics.baseline={}", file.display());
    let report = diagnosis(&late, &["--set", &baseline]);
    assert_eq!(report["steps"][0]["regime"], "template_collapse");
    assert_eq!(report["steps"][0]["baseline"]["steps"], 6);
    assert_eq!(report["steps"][0]["alarm"], true);
}

#[test]
fn survivors_of_a_format_collapse_do_not_look_healthy() {
    let policy = config("quickstart/policy.pt");
    let mut rows = quickstart_lines(0);
    let total = rows.len();
    for (index, row) in rows.iter_mut().enumerate() {
        let length = row["response_ids"].as_array().unwrap().len();
        match index % 4 {
            0 => row["reasoning"] = json!([[0, length]]),
            1 => row["reasoning"] = json!([[1, 1]]),
            2 => row["reasoning"] = json!([]),
            // Not even a list, where others have one.
            _ => {}
        }
    }
    let folder = StudyFolder::new(&policy, &rows, "");
    let output = diagnose(&folder, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stderr(&output);
    let counts = format!("only {} of {total} trajectories have a reasoning span", total / 4);
    assert!(said.contains(&counts) && said.contains("format collapse"), "{said}");
    let report = read(&folder.path("out/diagnosis.json"));
    let step = &report["steps"][0];
    assert_eq!(step["regime"], "format_collapse");
    let spans = &step["spans"];
    assert_eq!(
        (&spans["empty_spans"], &spans["without_span"]),
        (&json!(total / 4), &json!(total / 2))
    );
    assert_eq!(number(&step["valid_share"]), 0.25);
    // What the survivors give is told, and remembered nowhere.
    assert_eq!(number(&step["metrics"]["retrieval_accuracy"]), 1.0);
    assert!(read(&folder.path("out/state.json"))["entries"][0]["measured"].is_null());
    assert!(step.get("mi_zscore_ema").is_none());

    // With no span at all nothing is scored, and that is a diagnosis.
    for row in &mut rows {
        row["reasoning"] = json!([]);
    }
    write_lines(&folder.path("rollouts.jsonl"), &rows);
    let report = diagnosis(&folder, &["--force"]);
    let step = &report["steps"][0];
    assert_eq!((&step["regime"], &step["metrics"]), (&json!("format_collapse"), &Value::Null));
}

#[test]
fn what_needs_no_reward_and_no_second_trajectory_does_without() {
    let mut rows = good_lines();
    rows[0]["reward"] = Value::Null;
    // One trajectory of the last group.
    rows.truncate(13);
    let report = diagnosis(&gpt2(&rows, ""), &[]);
    assert_eq!(report["steps"][0]["cost"]["rows"], 13);
    assert_eq!(report["steps"][0]["cost"]["contexts"], 4);
}

#[test]
fn one_context_tells_nothing_apart() {
    let rows: Vec<Value> = good_lines().into_iter().take(4).collect();
    let folder = gpt2(&rows, "");
    let output = diagnose(&folder, &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("at least two distinct contexts"), "{}", stderr(&output));
    let step = &read(&folder.path("out/diagnosis.json"))["steps"][0];
    assert!(step["metrics"].is_null() && step["regime"].is_null());
}

#[test]
fn foreign_rollouts_and_varying_contexts_are_told() {
    let folder = gpt2(&lines(&synthetic_batch(4, 1)), "");
    let said = stderr(&diagnose(&folder, &[]));
    assert!(said.contains("old_logprobs differ from this policy's"), "{said}");
    let mut rows = good_lines();
    for row in &mut rows {
        let length = row["response_ids"].as_array().unwrap().len();
        row["reasoning"] = json!([[1, length]]);
    }
    let said = stderr(&diagnose(&gpt2(&rows, ""), &[]));
    assert!(said.contains("4 groups have") && said.contains("distinct contexts"), "{said}");
}

#[test]
fn rollouts_without_steps_follow_what_the_state_holds() {
    let folder = gpt2(&good_lines(), "diagnostics: {state: past.json}\n");
    for expected in 0..3 {
        let report = diagnosis(&folder, &["--force"]);
        assert_eq!(report["steps"][0]["step"], expected);
    }
    assert_eq!(read(&folder.path("past.json"))["entries"].as_array().unwrap().len(), 3);
}

#[test]
fn several_checkpoints_are_as_many_steps() {
    let folder = gpt2(&good_lines(), "");
    let both = format!(
        "policy.checkpoint=[{0}, {1}, {1}]",
        fixture("gpt2.pt").display(),
        fixture("llama.pt").display()
    );
    let report = diagnosis(&folder, &["--set", &both]);
    let steps = report["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3);
    for (index, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], index);
    }
    assert_ne!(steps[0]["metrics"]["mi_estimate"], steps[1]["metrics"]["mi_estimate"]);
}

/// Ctrl-C: finished steps are written and marked, and the exit code is 130.
#[cfg(unix)]
#[test]
fn an_interrupted_diagnosis_keeps_what_is_finished() {
    // Long enough that a signal comes in between: forward passes of a few sequences.
    let rows: Vec<Value> = (0..400).flat_map(quickstart_lines).collect();
    let yaml = "diagnostics: {token_budget: 64, state: past.json}\n";
    let folder = StudyFolder::new(&config("quickstart/policy.pt"), &rows, yaml);
    let mut command = gradprism(&["diagnose"]);
    command.arg(folder.path("study.yaml")).arg("--out").arg(folder.path("out"));
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    // The first step is in TensorBoard when a picture makes the file large.
    let is_begun = || {
        let entries =
            std::fs::read_dir(folder.path("out/.partial")).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.metadata().ok()).any(|data| data.len() > 10_000)
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !is_begun() {
        assert!(std::time::Instant::now() < deadline && child.try_wait().unwrap().is_none());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let report = read(&folder.path("out/diagnosis.json"));
    assert_eq!(report["partial"], true);
    let done = report["steps"].as_array().unwrap().len();
    assert!((1..400).contains(&done), "{done}");
    // The state goes as far as the report, and the lines of the matrix too.
    let past = read(&folder.path("past.json"));
    assert_eq!(past["entries"].as_array().unwrap().len(), done);
    assert_eq!(read_lines(&folder.path("out/scores.jsonl")).len(), done * 64);
    assert!(!folder.path("out/.partial").exists());
}

/// Runs, and expects one error that says all of `says`, the exit code, and no output.
#[track_caller]
fn assert_refused(folder: &StudyFolder, arguments: &[&str], code: i32, says: &[&str]) {
    let before: Vec<PathBuf> = listed(folder);
    let output = diagnose(folder, arguments);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    for text in says {
        assert!(said.contains(text), "`{said}` does not say `{text}`");
    }
    assert!(!said.contains("panicked") && !said.contains("frame #"), "{said}");
    assert!(output.stdout.is_empty());
    assert_eq!(listed(folder), before, "something was left behind");
}

fn listed(folder: &StudyFolder) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.folder.path()).unwrap();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn bad_input_is_one_clear_error() {
    const FAILED: i32 = 1;
    const WRONG_USAGE: i32 = 2;
    let folder = gpt2(&good_lines(), "");
    for (setting, says) in [
        // The cost is known before it is paid.
        (
            "diagnostics.max_sequences=10",
            ["diagnostics.max_sequences", "distinct contexts", "10 are allowed"].as_slice(),
        ),
        ("diagnostics.samples=1", &["diagnostics.samples", "at least 2"]),
        ("diagnostics.min_valid=1.5", &["diagnostics.min_valid", "from 0 to 1"]),
        ("diagnostics.baseline_steps=1", &["diagnostics.baseline_steps", "at least 2"]),
        ("diagnostics.token_budget=0", &["diagnostics.token_budget", "at least 1"]),
        ("diagnostics.marginal=papers", &["paper", "code"]),
        ("diagnostics.sample=3", &["did you mean `samples`"]),
        ("diagnostics.state=nowhere/state.json", &["diagnostics.state", "folder that exists"]),
        ("policy.kind=step", &["policy.kind", "causal_lm"]),
    ] {
        assert_refused(&folder, &["--set", setting], WRONG_USAGE, says);
    }
    let missing = ["--set", "diagnostics.baseline=nowhere.json"];
    assert_refused(&folder, &missing, FAILED, &["cannot read", "nowhere.json"]);
    let rollouts = format!("diagnostics.state={}", folder.path("rollouts.jsonl").display());
    assert_refused(&folder, &["--set", &rollouts], WRONG_USAGE, &["expected a state.json"]);
    let nowhere = ["--set", "policy.checkpoint=nowhere.pt"];
    assert_refused(&folder, &nowhere, FAILED, &["nowhere.pt", "no such file"]);

    let mut rows = good_lines();
    rows[2]["response_ids"][1] = json!(99);
    let says = ["rollouts.jsonl:3", "response_ids[1]", "below 16", "found 99"];
    assert_refused(&gpt2(&rows, ""), &[], FAILED, &says);

    // Each context and each span fits, and not the longest of both.
    let mut rows = good_lines();
    rows[0]["prompt_ids"] = json!(vec![1; 40]);
    rows[5]["response_ids"] = json!(vec![1; 40]);
    rows[5]["response_mask"] = json!(vec![1; 40]);
    for row in &mut rows {
        for key in ["ref_logprobs", "values"] {
            row.as_object_mut().unwrap().remove(key);
        }
    }
    let says = ["every span is scored under every context", "up to 79 tokens"];
    assert_refused(&gpt2(&rows, ""), &[], FAILED, &says);

    // A state of another marginal is not carried on.
    let folder = gpt2(&good_lines(), "diagnostics: {state: past.json}\n");
    diagnosis(&folder, &[]);
    let arguments = ["--force", "--set", "diagnostics.marginal=code"];
    assert_refused(&folder, &arguments, WRONG_USAGE, &["diagnostics.state", "name another file"]);
    assert_eq!(read(&folder.path("past.json"))["marginal"], "paper");
}

#[test]
fn tensorboard_reads_the_numbers_and_the_pictures() {
    let Some(python) = common::python("tensorboard_reads_the_numbers_and_the_pictures") else {
        return;
    };
    let folder = StudyFolder::new(&config("quickstart/policy.pt"), &collapsing_steps(), "");
    let report = diagnosis(&folder, &[]);
    let script = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={'images': 0})
events.Reload()
tags = events.Tags()
print(json.dumps({
    'scalars': {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags['scalars']},
    'images': {tag: [[e.step, e.width, e.height] for e in events.Images(tag)] for tag in tags['images']},
}))";
    let output = std::process::Command::new(python)
        .args(["-c", script])
        .arg(folder.path("out"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let steps = report["steps"].as_array().unwrap();
    for (tag, of) in [
        (
            "collapse/mi_estimate",
            (|step| number(&step["metrics"]["mi_estimate"])) as fn(&Value) -> f64,
        ),
        ("collapse/retrieval_accuracy@2", |step| number(&step["metrics"]["retrieval_accuracy@2"])),
        ("collapse/mi_zscore_ema", |step| number(&step["mi_zscore_ema"])),
        ("collapse/valid_share", |_| 1.0),
        ("collapse/alarm", |step| f64::from(u8::from(step["alarm"] == true))),
    ] {
        let points = found["scalars"][tag].as_array().unwrap_or_else(|| panic!("no {tag}"));
        assert_eq!(points.len(), steps.len(), "{tag}");
        for (point, step) in points.iter().zip(steps) {
            assert_eq!(point[0], step["step"]);
            assert_close(number(&point[1]), of(step), 1e-6, of(step).abs().max(1e-6), tag);
        }
    }
    // CUSUM begins with the baseline.
    assert_eq!(found["scalars"]["collapse/cusum"].as_array().unwrap().len(), 4);
    for tag in ["collapse/scores", "collapse/plane"] {
        let images = found["images"][tag].as_array().unwrap();
        assert_eq!(images.len(), steps.len(), "{tag}");
        assert!(images.iter().all(|image| number(&image[1]) >= 640.0), "{tag}");
    }
}
