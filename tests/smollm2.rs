//! A real language model of 135 M parameters against plain PyTorch. `GRADPRISM_SMOLLM2` names the
//! checkpoint, which the README says how to make; it is too large to keep here.

mod common;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use common::{assert_close, config, gradprism, stderr};
use gradprism::diagnostics::{CrossScores, Marginal};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use tch::Tensor;

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The checkpoint, or a loud word that the test is skipped.
fn checkpoint() -> Option<OsString> {
    let checkpoint = std::env::var_os("GRADPRISM_SMOLLM2");
    if checkpoint.is_none() {
        eprintln!("SKIPPED: set GRADPRISM_SMOLLM2 to a TorchScript file of SmolLM2-135M");
    }
    checkpoint
}

/// Runs a command on the checkpoint and a rollout file, on all cores.
fn run(command: &str, checkpoint: &OsStr, rollouts: &Path, out: &Path) {
    let output = gradprism(&[command, "--quiet"])
        .env_remove("OMP_NUM_THREADS")
        .arg(config("smollm2.yaml"))
        .arg("--set")
        .arg(format!("policy.checkpoint={}", checkpoint.to_string_lossy()))
        .arg("--set")
        .arg(format!("rollouts.path={}", rollouts.display()))
        .arg("--out")
        .arg(out)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn the_split_of_smollm2_is_that_of_plain_pytorch() {
    let Some(checkpoint) = checkpoint() else { return };
    let folder = tempfile::tempdir().unwrap();
    let rollouts = folder.path().join("rollouts.jsonl");
    // Two groups of known numbers, and a third of equal rewards.
    let text = std::fs::read_to_string(golden("smollm2_rollouts.jsonl")).unwrap();
    let lines: Vec<&str> = text.lines().take(24).collect();
    std::fs::write(&rollouts, lines.join("\n")).unwrap();
    let out = folder.path().join("out");
    run("study", &checkpoint, &rollouts, &out);

    let parse = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let groups: Vec<Value> = read(&out.join("prompts.jsonl")).lines().map(parse).collect();
    let known = parse(&read(&golden("smollm2_decomposition.json")));
    let number = |value: &Value| value.as_f64().unwrap();
    for (group, known) in groups.iter().zip(known["groups"].as_array().unwrap()) {
        assert_eq!(group["group_id"], known["group_id"]);
        let task_sq = number(&known["task_norm"]).powi(2);
        for key in ["task_norm", "kl_unit_norm", "entropy_unit_norm", "reg_norm", "total_norm"] {
            let expected = number(&known[key]);
            assert_close(number(&group[key]), expected, 1e-3, expected, key);
        }
        for key in ["signal_sq", "noise_sq"] {
            assert_close(number(&group[key]), number(&known[key]), 1e-3, task_sq, key);
        }
        assert_close(
            number(&group["cos_task_reg"]),
            number(&known["cos_task_reg"]),
            1e-3,
            1.0,
            "cos",
        );
        let norms = |group: &Value| -> Vec<f64> {
            group["trajectory_task_norms"].as_array().unwrap().iter().map(number).collect()
        };
        for (found, expected) in norms(group).into_iter().zip(norms(known)) {
            assert_close(found, expected, 1e-3, expected, "trajectory_task_norms");
        }
    }
    assert_eq!(groups[2]["reward_variance"], 0.0);
    assert_eq!(groups[2]["task_norm"], 0.0);
    let summary = parse(&read(&out.join("summary.json")));
    assert_eq!(summary["policy"]["parameters"], 134_515_008);
}

#[test]
fn smollm2_answers_the_question_it_was_asked() {
    let Some(checkpoint) = checkpoint() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    run("diagnose", &checkpoint, &golden("smollm2_rollouts.jsonl"), &out);
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let report: Value = serde_json::from_str(&read("diagnosis.json")).unwrap();
    let seconds = report["wall_time"]["seconds"].as_f64().unwrap();
    eprintln!("the diagnosis took {seconds:.0} s");
    let step = &report["steps"][0];
    assert_eq!(step["cost"]["sequences"], 64 * 8);
    // The file's own log-probabilities are this policy's: spans are scored as they were sampled.
    assert!(step["old_logprobs_gap"].as_f64().unwrap() < 1e-4);
    let accuracy = step["metrics"]["retrieval_accuracy"].as_f64().unwrap();
    assert_eq!(step["metrics"]["retrieval_chance_level"], 0.125);
    assert!(accuracy >= 0.6, "{accuracy}");

    // The same matrix, its labels permuted: nothing is left but chance.
    let rows: Vec<Value> =
        read("scores.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<f64> = rows
        .iter()
        .flat_map(|row| row["log_likelihood"].as_array().unwrap())
        .map(|score| score.as_f64().unwrap())
        .collect();
    let whole = |row: &Value, key: &str| row[key].as_u64().unwrap() as usize;
    let lengths: Vec<usize> = rows.iter().map(|row| whole(row, "length")).collect();
    let mut columns: Vec<usize> = rows.iter().map(|row| whole(row, "column")).collect();
    let matrix = Tensor::from_slice(&numbers).reshape([64, 8]);
    let contexts: Vec<usize> = (0..8).collect();
    let scores = CrossScores::new(&matrix, &lengths, &columns, &contexts).unwrap();
    let retrieval =
        |scores: &CrossScores| scores.metrics(Marginal::Paper).retrieval.retrieval_accuracy;
    assert_eq!(retrieval(&scores), accuracy);
    let mut random = ChaCha8Rng::seed_from_u64(0);
    let permuted: Vec<f64> = (0..200)
        .map(|_| {
            for last in (1..columns.len()).rev() {
                columns.swap(last, random.random_range(0..=last));
            }
            retrieval(&scores.with_columns(&columns).unwrap())
        })
        .collect();
    let mean = permuted.iter().sum::<f64>() / 200.0;
    assert_close(mean, 0.125, 0.02, 1.0, "permuted labels");
    eprintln!("retrieval {accuracy}, with permuted labels {mean:.4}");
    let reached = permuted.iter().filter(|permuted| **permuted >= accuracy).count();
    assert_eq!(reached, 0, "permutations as good as the labels themselves");
}
