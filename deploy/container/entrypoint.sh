#!/bin/sh
# Spark on Kubernetes starts an executor in this image with `executor`; any other argument is a penstock command.
set -eu

if [ "${1:-}" != executor ]; then
    exec penstock "$@"
fi

JAVA_HOME=$(python -c 'from penstock.spark import ensure_java; print(ensure_java().home)')
SPARK_HOME=$(python -c 'import os, pyspark; print(os.path.dirname(pyspark.__file__))')
export JAVA_HOME SPARK_HOME

# Spark numbers its options for Java in the environment: SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …
set --
number=0
while eval "option=\${SPARK_JAVA_OPT_$number-}" && [ -n "$option" ]; do
    set -- "$@" "$option"
    number=$((number + 1))
done

exec "$JAVA_HOME/bin/java" "$@" \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "$SPARK_HOME/jars/*${SPARK_CLASSPATH:+:$SPARK_CLASSPATH}" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
